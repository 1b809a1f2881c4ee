"""Each figure as data: a pure function computes a small frozen structure; `report.draw` and `report.plot` draw it."""

from backbeat.report.figures.compared import Compared, WayBars, compared, way_bars
from backbeat.report.figures.cost_curve import CostCurve, cost_curve
from backbeat.report.figures.exposed import Exposed, exposed
from backbeat.report.figures.gradients import GradientSizes, gradient_sizes
from backbeat.report.figures.memory_use import MemoryUse, StepMemory, memory_use, step_memory
from backbeat.report.figures.scaling_curve import Scaling, ScalingLine, scaling
from backbeat.report.figures.timeline import Timeline, timeline

__all__ = [
    "Compared",
    "CostCurve",
    "Exposed",
    "GradientSizes",
    "MemoryUse",
    "Scaling",
    "ScalingLine",
    "StepMemory",
    "Timeline",
    "WayBars",
    "compared",
    "cost_curve",
    "exposed",
    "gradient_sizes",
    "memory_use",
    "scaling",
    "step_memory",
    "timeline",
    "way_bars",
]
