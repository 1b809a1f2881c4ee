"""How long one iteration takes."""

from backbeat.simulate.batch import at_batch, strong_scaling
from backbeat.simulate.predict import predict
from backbeat.simulate.schedule import Flow, Schedule

__all__ = ["Flow", "Schedule", "at_batch", "predict", "strong_scaling"]
