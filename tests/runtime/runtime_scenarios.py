"""Training situations, each against a mean of local gradients made by hand.

A scenario is written once and runs on several routes: backbeat's reducer, the same buckets on two communicators, the
same buckets compressed without loss, the plan through torch's reducer (`reducer="ddp"`), and stock DDP for the record.
"""

from __future__ import annotations

import scenario_rig
import scenarios_graphs
import scenarios_steps
import scenarios_values
import scenarios_wrapper

SCENARIOS = {
    name: one
    for module in (scenarios_steps, scenarios_graphs, scenarios_values, scenarios_wrapper)
    for name, one in scenario_rig.SCENARIOS.items()
    if one.run.__module__ == module.__name__
}
"""By name, in the order of the table in validation/runtime/README.md, whichever module was imported first."""
