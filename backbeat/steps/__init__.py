"""A training step as a graph of operations: one builder for each way of training.

A builder is given a model as a chain of pieces, a plan, and what collectives take; `backbeat.engine` runs the graph.
"""
