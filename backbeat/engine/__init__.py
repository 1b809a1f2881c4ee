"""A graph of operations, run: when each starts and ends, what is held meanwhile, and why it takes as long as it does.

Nothing here knows of training; `steps` builds the graphs.
"""

from backbeat.engine.graph import Graph, GraphTimes, SharedLink
from backbeat.engine.run import run

__all__ = ["Graph", "GraphTimes", "SharedLink", "run"]
