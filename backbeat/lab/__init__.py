"""A virtual cluster on one machine: nodes with network stacks of their own, real collectives, replayed compute."""
