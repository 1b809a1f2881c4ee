"""The server's manners: this machine only, bounded requests, one line for what it refuses."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from backbeat.errors import InputError
from backbeat.model import files
from backbeat.show.pages.server import MOST_UPLOAD_BYTES
from tests.show.hostile import MARKUP, hostile_profile
from tests.show.server_process import running


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running() as found:
        yield found


def ask(url: str, *, data: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    request = urllib.request.Request(
        url, data=data, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def test_the_page_fetches_only_from_itself(address: str) -> None:
    status, body, headers = ask(address)
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    text = body.decode()
    assert 'src="/plotly.min.js"' in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert ask(f"{address}/plotly.min.js")[0] == 200


def test_answers_and_traces(address: str) -> None:
    status, body, _ = ask(f"{address}/api/answer?workers=8&profile=vgg16-b64-bf16-h200")
    assert status == 200
    assert json.loads(body)["answer"]["headline"]
    status, body, headers = ask(f"{address}/api/trace?workers=8&profile=vgg16-b64-bf16-h200")
    assert json.loads(body)["traceEvents"]
    assert "attachment" in headers["Content-Disposition"]


def test_layouts_are_served(address: str) -> None:
    status, body, _ = ask(f"{address}/layout")
    assert status == 200
    assert b'name="global_batch"' in body
    question = "model=llama-3.2-1b&gpus=8&global_batch=16&sequence=1024"
    status, body, _ = ask(f"{address}/api/layout?{question}")
    assert status == 200
    assert json.loads(body)["rows"]
    for wrong, why in (("model=../config.json", "there is no model"), ("cluster=10gbe", "does not say what GPUs")):
        status, body, _ = ask(f"{address}/api/layout?{wrong}")
        assert status == 400
        assert why in json.loads(body)["error"]


def test_a_refusal_is_one_line(address: str) -> None:
    status, body, _ = ask(f"{address}/api/answer?workers=lots")
    assert status == 400
    assert json.loads(body)["error"].startswith("workers is 'lots'")


def test_other_hosts_and_other_sites_are_turned_away(address: str) -> None:
    assert ask(address, Host="evil.example")[0] == 400
    status, body, _ = ask(f"{address}/api/upload", data=files.encode(hostile_profile()))
    assert status == 400
    assert b"from the page itself" in body


def test_uploads_are_limited_and_usable(address: str) -> None:
    status, body, _ = ask(f"{address}/api/upload", data=files.encode(hostile_profile()), X_Backbeat="1")
    assert status == 200
    said = json.loads(body)
    assert said["name"] == MARKUP
    assert ask(f"{address}/api/answer?profile={said['id']}")[0] == 200
    status, body, _ = ask(f"{address}/api/upload", data=b" " * (MOST_UPLOAD_BYTES + 1), X_Backbeat="1")
    assert status == 413
    assert b"larger than 16 MiB" in body
    assert ask(f"{address}/api/upload", data=b"\x80\x04cos\nsystem", X_Backbeat="1")[0] == 400


def test_a_port_in_use_is_said() -> None:
    from backbeat.cli.serve import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be used"):
            serve(port=taken.getsockname()[1])


def test_states_survive_json() -> None:
    from backbeat.show.pages.whatif import State

    assert msgspec.to_builtins(State())["workers"] == 64
