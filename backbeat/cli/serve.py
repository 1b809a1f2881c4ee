"""`backbeat serve`: the report with its question as a form on top, for this machine."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from backbeat.cli.output import say
from backbeat.errors import InputError, MissingPartError

_HOST = "127.0.0.1"


def serve(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)] = 8000,
) -> None:
    """Serve the report on this machine, with its question as a form on top."""
    try:
        import uvicorn

        from backbeat.show.pages.server import make_app
    except ImportError as error:
        raise MissingPartError(f"serve needs {error.name}: pip install -e '.[serve]' in the checkout") from None
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"--port {port} cannot be used ({error.strerror}): choose another, or 0 for a free one"
        ) from None
    say(f"http://{_HOST}:{listener.getsockname()[1]}  (Ctrl-C ends it)")
    config = uvicorn.Config(make_app(), log_level="warning", limit_concurrency=32, server_header=False)
    uvicorn.Server(config).run(sockets=[listener])
