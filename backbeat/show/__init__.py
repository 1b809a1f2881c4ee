"""Showing results: tables now, figures and traces beside them."""
