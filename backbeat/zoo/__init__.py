"""Bundled data: profiles, networks and accelerators; and the models of the profiles."""
