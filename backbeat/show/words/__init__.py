"""Predictions in words: numbers as people write them, what limits a job, whether it fits, and what to do."""
