"""Events of a Chrome trace, one by one: a trace of any size is read in the memory of a few of its events."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from backbeat.errors import InputError

_CHUNK = 1 << 20
_LARGEST_VALUE = 64 << 20
"""Characters of one value; more is damage, or not a trace."""
# How near the end of what has been read an error must lie to be blamed on what has not been read yet.
_EDGE = 16


class TraceReader:
    """Iterates over `traceEvents`; the file's other fields are in `top` once the iteration is over."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.top: dict[str, Any] = {}
        self._text = ""
        self._at = 0
        self._passed = 0
        self._decoder = json.JSONDecoder(strict=False)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as plain:
                opened = gzip.open if plain.read(2) == b"\x1f\x8b" else open
            with opened(self.path, "rt", encoding="utf-8", errors="replace") as text:
                yield from self._read(text)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            why = f"the compressed file is damaged or cut short ({error}): copy it again"
            raise InputError(f"{self.path}: {why}") from None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}): give another file") from None

    def _read(self, file: TextIO) -> Iterator[dict[str, Any]]:
        self._file = file
        first = self._peek()
        if first == "[":
            yield from self._events()
            return
        if first != "{":
            raise self._damaged("a trace is a JSON object with a list `traceEvents`")
        self._at += 1
        while (mark := self._peek()) != "}":
            if mark == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._damaged("a field was expected")
            self._at += 1
            if key == "traceEvents":
                yield from self._events()
            else:
                self.top[key] = self._value()

    def _events(self) -> Iterator[dict[str, Any]]:
        if self._peek() != "[":
            raise self._damaged("traceEvents is not a list")
        self._at += 1
        while (mark := self._peek()) != "]":
            if mark == ",":
                self._at += 1
                continue
            event = self._value()
            if not isinstance(event, dict):
                raise self._damaged("an event is not an object")
            yield event
        self._at += 1

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                unfinished = "Unterminated string" in error.msg or error.pos >= len(self._text) - _EDGE
                if not unfinished or len(self._text) - self._at > _LARGEST_VALUE:
                    raise self._damaged(error.msg) from None
                if not self._more():
                    raise self._cut_short() from None
                continue
            except (RecursionError, ValueError) as error:
                raise self._damaged(str(error)) from None
            # A number at the very end may go on in the next chunk.
            if end == len(self._text) and self._text[end - 1] not in '}]"' and self._more():
                continue
            self._at = end
            return value

    def _peek(self) -> str:
        """The next character that is no white space."""
        while True:
            while self._at < len(self._text):
                mark = self._text[self._at]
                if mark not in " \t\r\n":
                    return mark
                self._at += 1
            if not self._more():
                raise self._cut_short()

    def _more(self) -> bool:
        more = self._file.read(_CHUNK)
        self._passed += self._at
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more)

    def _damaged(self, why: str) -> InputError:
        return InputError(
            f"{self.path}, near character {self._passed + self._at}: not a trace of torch.profiler ({why}): "
            "export it again with export_chrome_trace"
        )

    def _cut_short(self) -> InputError:
        if self._passed + len(self._text) == 0:
            return InputError(f"{self.path}: the file is empty: give a trace that export_chrome_trace wrote")
        return InputError(f"{self.path}: the trace ends in the middle: it was cut short; copy or export it again")
