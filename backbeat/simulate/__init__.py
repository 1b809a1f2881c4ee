"""How long one iteration takes."""

from backbeat.simulate.predict import predict
from backbeat.simulate.schedule import Flow, Schedule

__all__ = ["Flow", "Schedule", "predict"]
