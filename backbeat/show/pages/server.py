"""The report over HTTP, for this machine only: its question is a form, and the form's address is the question."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from backbeat.answer.answer import answered
from backbeat.answer.asked import Asked
from backbeat.answer.do import Words
from backbeat.errors import BackbeatError, InputError
from backbeat.model import Network, Profile
from backbeat.model.architecture import BUNDLED
from backbeat.model.files import bundled
from backbeat.show.pages.report_page import form_page, plotly_source
from backbeat.units import parse_workers

FIELDS = {
    "gpus": ("GPUs", "64 or 8..512"),
    "way": ("ways", "all that may be"),
    "batch": ("micro-batch", "its own"),
    "global_batch": ("global batch", "GPUs × batch"),
    "sequence": ("sequence", "its own"),
    "framework": ("framework", "the model's"),
    "reduce_dtype": ("reduce dtype", "its own"),
    "recompute": ("recompute", "the least that fits"),
    "accelerator": ("accelerator", "the cluster's"),
    "load": ("load", "typical"),
    "memory": ("memory a GPU", "what it has"),
    "measured": ("own step", "fsdp@64=565ms"),
    "tokens": ("tokens", "15B"),
    "price": ("price", "2.5/gpu-h"),
    "deadline": ("deadline", "24h"),
    "goodput": ("goodput", "0.9"),
}
"""Keywords that the form has, each with its label and what stands for nothing said."""
FIRST = {"model": "llama-3-8b", "cluster": "aws-p5en", "gpus": "64"}
_NAME = re.compile(r"^[\w.+-]{1,80}(\.json(\.gz)?)?$")
_MOST_SIZES = 16
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src blob: data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app() -> Starlette:
    plotly = plotly_source()
    lists = {"models": [*BUNDLED, *bundled(Profile)], "clusters": list(bundled(Network))}

    # Starlette runs what is not async in a thread: others are answered meanwhile.
    def page(request: Request) -> Response:
        given = {name: text.strip() for name, text in request.query_params.items() if text.strip()} or dict(FIRST)
        form = {"given": given, "fields": FIELDS, **lists}
        words = Words(given.get("model", ""), given.get("cluster", ""))
        try:
            return HTMLResponse(form_page(form, answer_of(given), words))
        except BackbeatError as error:
            return HTMLResponse(form_page(form, None, words, problem=str(error)), status_code=400)

    def plotly_js(request: Request) -> Response:
        return Response(plotly, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    return Starlette(
        routes=[Route("/", page), Route("/plotly.min.js", plotly_js)],
        middleware=[
            # Another name for this machine is another site's, which would read the answers.
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
        ],
    )


def answer_of(given: Mapping[str, str]) -> Any:
    """The answer to what a form said. Files are named without folders: those where the server was started."""
    for name in given:
        if name not in FIELDS and name not in ("model", "cluster"):
            raise InputError(f"{name[:40]!r} is no field of the form: there are model, cluster, {', '.join(FIELDS)}")
    for name in ("model", "cluster", "accelerator"):
        text = given.get(name, "")
        if (name not in given and name != "accelerator") or (text and not _NAME.match(text)):
            raise InputError(f"{name} is {text[:40]!r}: choose a bundled name, or a file where this was started")
    if re.search(r"[/\\\\]", given.get("measured", "")):
        raise InputError("measured names a folder: write a step like fsdp@64=565ms, or a file where this was started")
    keywords: dict[str, Any] = {name: text for name, text in given.items() if name in FIELDS}
    sizes = parse_workers(keywords.pop("gpus", "64"), "GPUs")
    if len(sizes) > _MOST_SIZES:
        raise InputError(f"gpus names {len(sizes)} numbers: the page takes up to {_MOST_SIZES}")
    ways = [part.strip() for part in keywords.pop("way", "").split(",") if part.strip()]
    if any(not re.match(r"^[\w:=+-]{1,80}$", way) for way in ways):
        raise InputError("way names no way: write names like fsdp,hsdp:8 or layouts like tp=8+pp=2")
    return answered(Asked.of(given["model"], given["cluster"], **keywords), sizes, ways or None)


async def _with_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response
