"""Each figure as data: a pure function computes a small frozen structure, and `backbeat.report.draw` draws it."""

from backbeat.report.figures.cost import CostCurve, cost_curve
from backbeat.report.figures.exposed import Exposed, exposed
from backbeat.report.figures.gradients import GradientSizes, gradient_sizes
from backbeat.report.figures.memory import MemoryUse, memory_use
from backbeat.report.figures.scaling import Scaling, ScalingLine, scaling
from backbeat.report.figures.timeline import Bar, Timeline, timeline

__all__ = [
    "Bar",
    "CostCurve",
    "Exposed",
    "GradientSizes",
    "MemoryUse",
    "Scaling",
    "ScalingLine",
    "Timeline",
    "cost_curve",
    "exposed",
    "gradient_sizes",
    "memory_use",
    "scaling",
    "timeline",
]
