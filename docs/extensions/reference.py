"""The reference pages, written from the code while the site is built.

A page says where its generated part goes, in a comment that other Markdown readers do not show:

    <!-- commands: backbeat.cli:app -->      every verb with its arguments and options
    <!-- module: backbeat.model -->          every name in the module's __all__, by autodoc
    <!-- schema: profile -->                 every object and field of a file format
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

MARK = re.compile(r"^<!-- (commands|module|schema): (\S+) -->$", re.MULTILINE)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", mark_parameters)
    return {"parallel_read_safe": True}


def fill(_app: Any, page: str, source: list[str]) -> None:
    """Put what the comments ask for in their place, on the pages in docs/reference."""
    if page.startswith("docs/reference/"):
        write = {"commands": commands, "module": module, "schema": schema}
        source[0] = MARK.sub(lambda mark: "\n".join(write[mark[1]](mark[2])), source[0])


def mark_parameters(_app: Any, _what: str, _name: str, value: Any, _options: Any, lines: list[str]) -> None:
    """`name: what it is` in a docstring describes a parameter where there is one of that name."""
    try:
        # A class may be made by `__new__`, which passes everything on.
        names = set(inspect.signature(value.__init__ if inspect.isclass(value) else value).parameters)
    except (TypeError, ValueError):
        return
    for number, line in enumerate(lines):
        name, colon, text = line.partition(": ")
        if colon and name in names:
            lines[number] = f":param {name}: {text}"


def commands(target: str) -> Iterator[str]:
    """A typer app: a heading for each verb, its usage, and what it takes."""
    import typer

    name, _, attribute = target.partition(":")
    app = typer.main.get_command(getattr(import_module(name), attribute))
    context = app.make_context(app.name or "", [], resilient_parsing=True)
    for verb in app.list_commands(context):
        yield from _command(app.get_command(context, verb), verb, context)


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield from ("", f"## `{context.command_path}`", "", command.help or "", "")
    yield from ("```text", command.get_usage(context).removeprefix("Usage: "), "```", "")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and "--help" not in parameter.opts:
            yield f"- `{record[0]}`: {_plain(record[1])}"
    if hasattr(command, "list_commands"):
        for verb in command.list_commands(context):
            yield from _command(command.get_command(context, verb), verb, context)


def module(name: str) -> Iterator[str]:
    """A module's public names. Those that need PyTorch are left out where it is not installed."""
    from backbeat import __all__ as top
    from backbeat.errors import MissingPartError

    try:
        found = import_module(name)
        public = {each: getattr(found, each) for each in found.__all__ if name == "backbeat" or each not in top}
    except MissingPartError:
        if find_spec("torch"):
            raise
        yield f"`{name}` needs PyTorch, and this site was built without it."
        return
    for each, value in public.items():
        kind = "function"
        if inspect.isclass(value):
            kind = "exception" if issubclass(value, Exception) else "class"
        elif not callable(value):
            kind = "data"
        yield from ("", "```{eval-rst}", f".. auto{kind}:: {name}.{each}", "```", "")


def schema(name: str) -> Iterator[str]:
    """A JSON schema: one heading for each object, one line for each field."""
    schema = json.loads(files("backbeat.model.schemas").joinpath(f"{name}.json").read_text(encoding="utf-8"))
    for title, entry in schema["$defs"].items():
        yield from ("", f"### {title} ({name})", "", _plain(entry.get("description", "")), "")
        required = entry.get("required", [])
        for field, value in entry.get("properties", {}).items():
            optional = "" if field in required else ", optional"
            about = f": {_plain(value['description'])}" if "description" in value else ""
            yield f"- `{field}` ({_type(value)}{optional}){about}"


def _type(value: dict[str, Any]) -> str:
    """A field's type in words: `list of Bucket`, `number or null`."""
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "const" in value or "enum" in value:
        return " or ".join(f"`{each!r}`" for each in value.get("enum", [value.get("const")]))
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(each) for each in value["anyOf"]))
    if value.get("type") == "array":
        if "prefixItems" in value:
            return "list of " + ", ".join(_type(each) for each in value["prefixItems"])
        return f"list of {_type(value['items'])}" if isinstance(value.get("items"), dict) else "list"
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"object of {_type(value['additionalProperties'])}"
    return str(value.get("type", "anything"))


def _plain(text: str) -> str:
    """One line of Markdown, with `<` shown as it is written."""
    return " ".join(text.split()).replace("<", "\\<")
