"""The command line: one thin module per verb, each a typed function, imported when its verb runs.

This module may not import numpy, rich or msgspec: `backbeat --help` must cost no more than typer itself. Verbs import
torch inside functions, so that their own help does not wait for it.
"""

from __future__ import annotations

import errno
import io
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any, NoReturn

from backbeat.errors import BackbeatError, did_you_mean

with warnings.catch_warnings():
    # What typer before 0.26 imports from click 8.5 is deprecated there, which no user can mend.
    warnings.filterwarnings("ignore", r"'click\.utils\.get_(binary|text)_stream' is deprecated", DeprecationWarning)
    import typer
    from typer.core import TyperGroup

VERBS = {
    "demo": "The whole story on bundled data.",
    "predict": "How to train a model on a cluster: every way weighed, and one decision.",
    "plan": "Write down how a way is run: buckets, units or a layout.",
    "report": "The whole answer with figures, as one HTML file.",
    "trace": "One step for Perfetto, predicted and measured.",
    "serve": "The report with its question as a form on top, on this machine.",
    "zoo": "List the bundled models, profiles, networks and accelerators.",
    "network": "Describe a cluster from specifications or measurements.",
    "calibrate": "Measure a cluster's collectives, under torchrun.",
    "profile": "Measure a model's computation and gradients.",
    "import": "Read files of other tools.",
    "watch": "A running job in the terminal: exposed time, straggler, drift.",
    "lab": "A virtual cluster on this machine, measured beside predicted.",
}
"""Each with its line in the help."""
GONE_VERBS = {"layout": "`backbeat predict MODEL CLUSTER --gpus 64` weighs layouts beside every other way"}
GONE = {
    "--workers": "it is --gpus",
    "--strategy": "it is --way",
    "-s": "it is --way",
    "--layout": "it is --way, like --way tp=8+pp=2",
    "--layout-text": "it is --way, like --way tp=8+pp=2",
    "--zero": "say it as a --way: ddp, zero1, zero2, fsdp, or tp=8+zero=1",
    "--accumulation": "micro-batches follow from --global-batch and --batch",
    "--epoch-samples": "it is --samples, with --epochs",
    "--compute-factor": "it is --measured, like --measured fsdp@64=565ms",
    "--block": "it is --measured, like --measured fsdp@64=565ms",
    "--contention": "what computation loses beside communication always counts",
    "--family": "every answer is simulated; closed forms only rank layouts before",
    "--most": "the screen shows what matters, --json every row",
    "--memory-budget": "it is --memory",
    "--budget": "planning takes seconds, and ends by itself",
    "--reserve": "a hundredth of --memory is left, at most 64 MiB",
    "--residuals": "they live on the device where they fit, on the host otherwise",
    "--torch": "plans have what every torch since 2.10 has",
    "--wide": "--json has every figure of every way, the report as a table",
    "--plot": "`backbeat report` draws the curve, and saves it as PNG",
    "--max-batch": "`backbeat predict --json` says up to which batch it fits",
    "--redact": "a report shows the names in its files; rename them there before you share it",
    "--batch-size": "it is --batch",
    "--other-batch": "profile the model at both batch sizes, `backbeat profile --batch 32,64`",
}
"""Options of before 1.0 that went, each with what to say in their place."""


class Verbs(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in GONE_VERBS:
            ctx.fail(f"{args[0]} went: {GONE_VERBS[args[0]]}.")
        if args and args[0] not in VERBS:
            # Versions of typer and click differ in what they suggest, and would load every verb for it.
            near = did_you_mean(args[0], VERBS)
            ctx.fail(f"No such command {args[0]!r}. {near[:1].upper()}{near[1:]}")
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


app = typer.Typer(
    name="backbeat",
    cls=Verbs,
    help="How to train a model on many GPUs: how fast, whether it fits, what it costs, and how sure that is.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# What a command line that typer cannot read raises; typer brings its own copy of click or uses the installed one.
_REFUSED: Any = typer.BadParameter.__mro__[2]


def _show_version(asked: bool) -> None:
    if asked:
        from backbeat import __version__

        typer.echo(f"backbeat {__version__}")
        raise typer.Exit


@app.callback()
def _backbeat(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or log that knows ASCII only still gets its table, with ? for what it cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(prog_name="backbeat", standalone_mode=False)
    except BackbeatError as error:
        _end(f"backbeat: {error}", error.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What the disk could not take is not tried again when Python ends.
        sys.stdout = io.StringIO()
        _end("backbeat: the answer could not be written: no space is left on the device it goes to", 1)
    except typer.Abort:
        _end("backbeat: interrupted", 1)
    except _REFUSED as error:
        _end(_refusal(error), error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _refusal(error: Any) -> str:
    """What typer refuses, in one line. With no words at all it is the whole help."""
    said = error.format_message()
    if "\n" in said:
        return str(said)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "backbeat"
    option = getattr(error, "option_name", None)
    if option in GONE:
        return f"{command}: {option} went: {GONE[option]}."
    if option is not None:
        near = getattr(error, "possibilities", None)
        said = f"No such option: {option}" + (f"; did you mean {' or '.join(sorted(near))}?" if near else "")
    return f"{command}: {said[:1].lower()}{said[1:]}{'' if said[-1] in '.?' else '.'} See `{command} --help`."


def _end(said: str, code: int) -> NoReturn:
    from backbeat.units import printable

    print("\n".join(printable(line) for line in said.split("\n")), file=sys.stderr)
    sys.exit(code)
