"""The verbs by name. Each module is imported when its verb runs: `backbeat --help` reads this table alone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

VERBS = {
    "demo": "The whole story on bundled data.",
    "predict": "Predict how a job scales.",
    "plan": "Choose which gradients travel together, and save it.",
    "layout": "Rank layouts: tensor, pipeline, context, expert and data parallelism.",
    "report": "The whole answer with figures, as one HTML file.",
    "trace": "One iteration for Perfetto, predicted and measured.",
    "serve": "A local page to try what-ifs on.",
    "zoo": "List the bundled profiles and networks.",
    "network": "Describe a cluster from specifications or measurements.",
    "calibrate": "Measure a cluster's collectives, under torchrun.",
    "profile": "Measure a model's computation and gradients.",
    "import": "Read files of other tools.",
    "watch": "A running job in the terminal: exposed time, straggler, drift.",
    "lab": "A virtual cluster on this machine, measured beside predicted.",
}
"""Each with its line in the help."""


class Verbs(TyperGroup):
    """The table's verbs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # For a name that is no verb, typer suggests near ones among the commands it holds: only then load them all.
        if args and args[0] not in VERBS:
            self.commands.update({name: load(name) for name in VERBS})
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def load(name: str) -> Any:
    """One verb as typer builds it inside an app: its module's function of the same name, or `app` with verbs of its
    own."""
    # `import` is no name for a module.
    module = import_module(f"backbeat.cli.{'imports' if name == 'import' else name}")
    made = getattr(module, name, None) or module.app
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.callback()(lambda: None)
    if isinstance(made, typer.Typer):
        app.add_typer(made, name=name)
    else:
        app.command(name)(made)
    group: Any = typer.main.get_command(app)
    return group.commands[name]
