"""Each figure as data: a pure function computes a small frozen structure; `report.draw` and `report.plot` draw it."""

from backbeat.report.figures.compared import Compared, compared
from backbeat.report.figures.cost_curve import CostCurve, cost_curve
from backbeat.report.figures.exposed import Exposed, exposed
from backbeat.report.figures.gradients import GradientSizes, gradient_sizes
from backbeat.report.figures.memory_use import MemoryUse, memory_use
from backbeat.report.figures.scaling_curve import Scaling, ScalingLine, scaling
from backbeat.report.figures.timeline import Bar, Timeline, timeline

__all__ = [
    "Bar",
    "Compared",
    "CostCurve",
    "Exposed",
    "GradientSizes",
    "MemoryUse",
    "Scaling",
    "ScalingLine",
    "Timeline",
    "compared",
    "cost_curve",
    "exposed",
    "gradient_sizes",
    "memory_use",
    "scaling",
    "timeline",
]
