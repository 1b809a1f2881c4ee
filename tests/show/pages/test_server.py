"""The server's manners: this machine only, a question in the address, one line for what it refuses."""

from __future__ import annotations

import html
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import backbeat as bb
from backbeat.errors import InputError
from tests.show.server_process import running

JOB = "model=resnet50-b64-bf16-h200&cluster=100gbe&gpus=8&way=ddp,best"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running() as found:
        yield found


def ask(url: str, **headers: str) -> tuple[int, str, Any]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def test_the_page_fetches_only_from_itself_and_shows_the_answer(address: str) -> None:
    status, text, headers = ask(f"{address}/?{JOB}")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert 'src="/plotly.min.js"' in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert ask(f"{address}/plotly.min.js")[0] == 200
    found = bb.compare("resnet50-b64-bf16-h200", "100gbe", gpus=8, ways=["ddp", "best"])
    assert html.escape(found.decision.text) in text
    assert 'value="resnet50-b64-bf16-h200"' in text
    assert '<form class="card controls" method="get"' in text


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (f"{JOB}&gpus=lots", "is not a number of GPUs"),
        ("model=../secret.json&cluster=100gbe", "choose a bundled name"),
        ("model=resnet50-b64-bf16-h200&cluster=/etc/passwd", "choose a bundled name"),
        (f"{JOB}&measured=../../x.json", "names a folder"),
        (f"{JOB}&bogus=1", "is no field of the form"),
    ],
)
def test_a_refusal_is_one_line_on_the_page(address: str, query: str, why: str) -> None:
    status, text, _ = ask(f"{address}/?{query}")
    assert status == 400
    assert why in html.unescape(text)


def test_other_hosts_are_turned_away(address: str) -> None:
    assert ask(address, Host="evil.example")[0] == 400


def test_a_port_in_use_is_said() -> None:
    from backbeat.cli.serve import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be used"):
            serve(port=taken.getsockname()[1])
