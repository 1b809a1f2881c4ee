"""The what-if page over HTTP, for this machine only. Uploads are checked like any file, and kept in memory."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from backbeat.errors import BackbeatError, InputError
from backbeat.model import Network, Profile
from backbeat.model.files import bundled, decode
from backbeat.show.pages.layout_page import LayoutState, layout_tab, respond_layouts
from backbeat.show.pages.report_page import full_trace, plotly_source, rendered, script_json
from backbeat.show.pages.whatif import MOST_GRADIENTS, Library, State, respond, study_of

MOST_UPLOAD_BYTES = 16 * 2**20
_MOST_UNPACKED_BYTES = 64 * 2**20
_MOST_READ_BYTES = 16 * MOST_UPLOAD_BYTES
_MOST_KEPT = 16
_OWN_HEADER = "x-backbeat"
"""Other sites cannot send it without asking first, and are not allowed when they ask."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app() -> Starlette:
    library = Library({}, {})
    plotly = plotly_source()

    # Starlette runs what is not async in a thread: others are answered meanwhile.
    def page(request: Request) -> Response:
        names = {"profiles": list(bundled(Profile)), "networks": list(bundled(Network))}
        data = script_json(msgspec.to_builtins(State()))
        return HTMLResponse(rendered("serve.html.j2", served="/", **names, data=data))

    def plotly_js(request: Request) -> Response:
        return Response(plotly, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    def reply(request: Request) -> Response:
        fields = dict(request.query_params)
        thorough = fields.pop("thorough", "") == "1"
        return _json(respond(State.parse(fields), library, thorough=thorough))

    def tab(request: Request) -> Response:
        return HTMLResponse(layout_tab())

    def reply_layouts(request: Request) -> Response:
        state = LayoutState.parse(dict(request.query_params))
        return _json(respond_layouts(state, library.network(state.cluster)))

    def trace(request: Request) -> Response:
        study = study_of(State.parse(dict(request.query_params)), library, thorough=True)
        response = _json(full_trace(study))
        response.headers["Content-Disposition"] = 'attachment; filename="trace.json"'
        return response

    async def upload(request: Request) -> Response:
        if _OWN_HEADER not in request.headers:
            raise InputError("uploads are taken from the page itself only: open it and choose the file there")
        return _json(keep(library, await _body(request)))

    return Starlette(
        routes=[
            Route("/", page),
            Route("/plotly.min.js", plotly_js),
            Route("/api/answer", reply),
            Route("/layout", tab),
            Route("/api/layout", reply_layouts),
            Route("/api/trace", trace),
            Route("/api/upload", upload, methods=["POST"]),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
        ],
        exception_handlers={BackbeatError: _refused},
    )


def keep(library: Library, raw: bytes) -> dict[str, str]:
    """Check an uploaded profile or network, and keep it under a name of its own."""
    text = unpacked(raw)
    kind: type[Profile] | type[Network] = Network if b'"backbeat.network/2"' in text[:4096] else Profile
    document = decode(text, kind, where="the uploaded file")
    key = f"upload-{hashlib.sha256(text).hexdigest()[:12]}"
    if isinstance(document, Profile) and len(document.gradients) > MOST_GRADIENTS:
        raise InputError(
            f"the uploaded profile has {len(document.gradients)} gradients: the page takes up to {MOST_GRADIENTS}; "
            "use `backbeat report`"
        )
    kept: dict[str, Any] = library.profiles if isinstance(document, Profile) else library.networks
    kept.pop(key, None)
    kept[key] = document
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    return {"kind": kind.__name__.lower(), "id": key, "name": document.name[:200]}


def unpacked(raw: bytes) -> bytes:
    """Bytes of JSON, plain or gzipped; a small file that unpacks to a huge one is refused before it does."""
    if raw[:2] != b"\x1f\x8b":
        return raw
    stream = zlib.decompressobj(wbits=31)
    try:
        text = stream.decompress(raw, _MOST_UNPACKED_BYTES)
    except zlib.error as error:
        raise InputError(f"the uploaded file is damaged or cut short ({error}): upload it again") from None
    if stream.unconsumed_tail:
        raise InputError(f"the uploaded file unpacks to more than {_MOST_UNPACKED_BYTES} bytes: it is no profile")
    if not stream.eof:
        raise InputError("the uploaded file is cut short: upload it again")
    return text


async def _body(request: Request) -> bytes:
    """The one file of the request, read no further than the limit."""
    too_large = InputError(f"the file is larger than {MOST_UPLOAD_BYTES // 2**20} MiB: use `backbeat report` for it")
    length = 0
    taken = bytearray()
    async for chunk in request.stream():
        length += len(chunk)
        # Read on and forget, so that the sender is told why; somebody who sends without end is cut off.
        if length > _MOST_READ_BYTES:
            break
        taken = taken + chunk if length <= MOST_UPLOAD_BYTES else bytearray()
    if length > MOST_UPLOAD_BYTES:
        raise too_large
    if not taken:
        raise InputError("the upload is empty: choose a profile or a network file")
    return bytes(taken)


async def _with_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


async def _refused(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, status=413 if "larger than" in str(error) else 400)


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")
