"""Reading and writing backbeat's own files: strict in, whole out.

Every file says which schema it follows. A name that is no path is looked up in the zoo, so that
`resnet50-b64-bf16-h200` and `./mine.json` are loaded by the same call.
"""

from __future__ import annotations

import contextlib
import difflib
import gzip
import os
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from backbeat.errors import InputError
from backbeat.model.checks import Checked

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T", bound="Document")

ZOO = Path(__file__).resolve().parent.parent / "zoo"
_ACCESS = "check who may read the file and its folder (ls -ld)"


class Document(Checked, frozen=True, kw_only=True, dict=True):
    """A value that has a file of its own."""

    SCHEMA: ClassVar[str] = ""
    """The file's first field."""
    FOLDER: ClassVar[str] = ""
    """In the zoo."""
    FORMS: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Sets of fields of which a file has exactly one."""

    @property
    def schema(self) -> str:
        return self.SCHEMA

    @property
    def derived(self) -> tuple[str, ...]:
        """Fields that follow from others, so that files leave them out."""
        return ()

    @classmethod
    def load(cls: type[T], name: str | os.PathLike[str]) -> T:
        """Read a file, or a bundled one by its name."""
        path = find(name, cls)
        return decode(read(path), cls, where=str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all."""
        write(path, encode(self))


class Source(Checked, frozen=True, kw_only=True):
    """How a profile or a network was obtained: every bundled file carries one of these."""

    method: Literal["measured", "composed", "analytic", "imported", "published", "assumed"]
    """`composed`: added up from measurements of parts."""
    command: str | None = None
    machine: str | None = None
    date: str | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    reference: str | None = None
    """The paper, table or vendor figure that the numbers are taken from."""


def find(name: str | os.PathLike[str], kind: type[Document]) -> Path:
    if not isinstance(name, (str, os.PathLike)):
        raise InputError(
            f"the {_noun(kind)} is given as {type(name).__name__}: give a {kind.__name__}, or a file's name"
        )
    path = Path(name)
    text = os.fspath(name)
    if not text:
        raise InputError(f"the name of the {_noun(kind)} is empty: give a file, or a bundled name (`backbeat zoo`)")
    # A pipe, as `<(…)` makes it, is read like a file.
    if _exists(path):
        if os.path.isdir(path):
            raise InputError(f"{text} is a folder: give the {_noun(kind)} file in it")
        return path
    looks_like_path = os.sep in text or text.endswith((".json", ".gz"))
    names = bundled(kind)
    if not looks_like_path and text in names:
        return names[text]
    if not names:
        made = ", or write one with `backbeat plan`" if _noun(kind) == "plan" else ""
        raise InputError(f"{text}: no such file. Check the path{made}")
    if looks_like_path:
        raise InputError(f"{text}: no such file. Check the path, or name a bundled {_noun(kind)} (`backbeat zoo`)")
    for other in Document.__subclasses__():
        if other is not kind and text in bundled(other):
            raise InputError(
                f"{text!r} is a bundled {_noun(other)}, but a {_noun(kind)} is needed here: "
                f"give the {_noun(kind)} in this place (PROFILE comes before NETWORK)"
            )
    close = difflib.get_close_matches(text, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else "`backbeat zoo` lists the bundled ones."
    raise InputError(f"{text!r} is neither a file nor a bundled {_noun(kind)}: {hint}")


def _exists(path: Path) -> bool:
    """Whether there is something to read; a folder that may not be searched is not the same as nothing."""
    try:
        os.stat(path)
    except PermissionError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): {_ACCESS}") from None
    except (OSError, ValueError):
        return False
    return True


def existing(path: str | os.PathLike[str], what: str) -> Path:
    """A file that another tool wrote, or an error that says what to give."""
    found = Path(path)
    if not found.is_file():
        raise InputError(f"{found}: {'it is a folder' if found.is_dir() else 'no such file'}: give {what}")
    return found


def bundled(kind: type[Document]) -> dict[str, Path]:
    """The zoo's files of one kind, by name."""
    folder = ZOO / kind.FOLDER
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.json.gz"))
    return {file.name.removesuffix(".gz").removesuffix(".json"): file for file in files}


def read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the compressed file is damaged or cut short ({error}): copy it again") from None
    except PermissionError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): {_ACCESS}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def decode(raw: bytes, kind: type[T], where: str) -> T:
    """Bytes of JSON to a checked value; every refusal names the field."""
    wanted = kind.SCHEMA
    data = _json(raw, where, wanted)
    if not isinstance(data, dict):
        raise InputError(f"{where}: a {wanted} file holds one JSON object, this holds a {type(data).__name__}")
    found = data.pop("schema", None)
    if found is None:
        raise InputError(f'{where}: the field "schema" is missing: add "schema": "{wanted}"')
    if found != wanted:
        raise InputError(f"{where}: schema is {found!r}, but {wanted!r} is needed here{_schema_advice(found, wanted)}")
    return checked(data, kind, f"{where}: ", "correct it, or write the file again")


def checked(data: Any, kind: type[S], where: str, advice: str = "correct it", *, strict: bool = True) -> S:
    """Plain data as a checked value; a refusal begins with `where` and names the field."""
    try:
        return msgspec.convert(data, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise InputError(where + _field_error(error, kind, advice)) from None


def encode(document: Document) -> bytes:
    body = msgspec.to_builtins(document, enc_hook=_plain_number)
    for field in document.derived:
        del body[field]
    first = {key: body[key] for key in ("name",) if key in body}
    text = msgspec.json.encode({"schema": document.schema, **first, **body})
    indented = msgspec.json.format(text, indent=1)
    # The innermost objects and lists on one line each: files stay small and diffs readable.
    one_line = re.compile(rb"[\[{]\s*[^\[\]{}]*?[\]}]")
    return one_line.sub(lambda match: re.sub(rb"\n\s*", b" ", match.group(0)), indented) + b"\n"


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write through a temporary file beside the target, so that a half-written file never has its name.

    A device or a pipe (`/dev/stdout`) is written to; a file in its place would break it for everyone.
    """
    target = Path(path)
    if target.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    if target.is_dir():
        raise InputError(f"{target} is a folder: give a file name to write")
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            target.write_bytes(data)
        else:
            _write_and_rename(target, data)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror})") from None


def _write_and_rename(target: Path, data: bytes) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror}): make the folder or choose another") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def json_schema(kind: type[Document]) -> dict[str, Any]:
    """The JSON Schema of a file, generated from the type that reads it."""
    schema = msgspec.json.schema(kind)
    body = schema["$defs"][kind.__name__]
    body["properties"] = {"schema": {"const": kind.SCHEMA}, **body["properties"]}
    body["required"] = ["schema", *body.get("required", [])]
    if kind.FORMS:
        body["oneOf"] = [{"required": list(fields)} for fields in kind.FORMS]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": kind.SCHEMA, **schema}


def _plain_number(value: Any) -> Any:
    """numpy's numbers as Python's, for values that were built in Python rather than read."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written to a file")


def _json(raw: bytes, where: str, wanted: str) -> Any:
    if not raw.strip():
        raise InputError(f"{where}: the file is empty: a {wanted} file was expected")
    try:
        return msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        match = re.search(r"byte (\d+)", str(error))
        at = min(int(match.group(1)), len(raw)) if match else len(raw)
        line, column = raw.count(b"\n", 0, at) + 1, at - raw.rfind(b"\n", 0, at)
        word = re.match(rb"-?(NaN|Infinity|nan|inf)", raw[max(at - 1, 0) : at + 12].lstrip(b":[, "))
        if word:
            why = f"{word.group(0).decode()} is not a number: every figure must be finite; measure it again"
        elif "truncated" in str(error):
            why = "the file ends in the middle: it was cut short; copy or write it again"
        else:
            why = f"not JSON ({error}): give a {wanted.removeprefix('backbeat.').partition('/')[0]} file"
        raise InputError(f"{where}, line {line} column {column}: {why}") from None


def _field_error(error: msgspec.ValidationError, kind: type[msgspec.Struct], advice: str) -> str:
    """msgspec's `what - at `$.field`` as `field: what`, with advice where the rule is known."""
    what, _, field = str(error).partition(" - at `")
    field = field.rstrip("`").removeprefix("$").removeprefix(".")
    if "missing required field" in what:
        what += ": add it"
    elif "contains unknown field" in what:
        what += ": remove it, or check its spelling"
    elif "Invalid enum value" in what:
        what += f": it must be {' or '.join(_allowed(field.rpartition('.')[2], kind))}"
    elif "Expected" in what:
        what += f": {advice}"
    return f"{field}: {what}" if field else what


def _allowed(field: str, kind: type[msgspec.Struct]) -> list[str]:
    """The few values that a field takes."""
    declared = [one["properties"].get(field, {}) for one in msgspec.json.schema(kind)["$defs"].values()]
    forms = [form for one in declared for form in (one, *one.get("anyOf", ()))]
    return next(form["enum"] for form in forms if "enum" in form)


def _schema_advice(found: object, wanted: str) -> str:
    kind = wanted.split("/")[0]
    if isinstance(found, str) and found.split("/")[0] == kind:
        return ": another version of backbeat wrote it; make it again with this one"
    if isinstance(found, str) and found.startswith("backbeat."):
        return f": give the {kind.removeprefix('backbeat.')} file in this place"
    return ""


def _noun(kind: type[Document]) -> str:
    return kind.__name__.lower()
