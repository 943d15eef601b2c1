"""The CLI's HTTP client: what it makes of answers, and of none."""

import http.server
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from compose.client import IDLE_S, Client, refused
from compose.refusal import ApiRefused, EnvironmentRefusal
from controlplane.plane import Plane


def test_both_shapes_of_errors_are_read() -> None:
    ours = refused(409, b'{"code":"busy","message":"two requests run"}', None)
    assert (ours.status, ours.code, ours.message, ours.retry_after_s) == (409, "busy", "two requests run", None)
    openai = refused(503, b'{"error":{"code":"backing_off","message":"later","type":"x","param":null}}', "4")
    assert (openai.code, openai.message, openai.retry_after_s) == ("backing_off", "later", 4)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "text"}'])
def test_an_answer_that_is_no_error_of_ours_still_becomes_one(body: bytes) -> None:
    assert refused(502, body, None).code == "502"


def test_a_plane_that_was_never_started_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGINEHOUSE_URL", raising=False)
    with pytest.raises(EnvironmentRefusal, match="enginehouse up"):
        Client.of(tmp_path)


def test_a_plane_that_does_not_answer_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGINEHOUSE_URL", raising=False)
    monkeypatch.delenv("ENGINEHOUSE_TOKEN", raising=False)
    Plane(data=str(tmp_path), postgres_url="", nats_url="", web_port=1).write()
    with pytest.raises(EnvironmentRefusal, match="ENGINEHOUSE_TOKEN"):
        Client.of(tmp_path)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "admin-token").write_text("eh_a_b\n")
    client = Client.of(tmp_path)
    with pytest.raises(EnvironmentRefusal, match="does not answer"):
        client.get("api", "models")
    client.close()


@pytest.mark.parametrize("url", ["plane", "ftp://plane", "http://", "http://h:99999", "http://h:x", "http://[", "http://h/v1"])
def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    with pytest.raises(EnvironmentRefusal, match="is not a plane's address"):
        Client(url, "eh_a_b")


@pytest.mark.parametrize("token", ["", "eh_a\nb", "eh_é", "eh_→"])
def test_a_token_that_no_header_takes_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(EnvironmentRefusal, match="token") as refused:
        Client("http://127.0.0.1:1", token)
    assert refused.value.code == "token"


@pytest.mark.parametrize("name", ["", "a/b", "../models"])
def test_a_name_that_would_be_another_path_is_refused_before_it_is_sent(name: str) -> None:
    with pytest.raises(ApiRefused, match="is no name") as refused:
        Client("http://127.0.0.1:1", "eh_a_b").post("api", "models", name, "load")
    assert refused.value.code == "invalid"


class Closing(http.server.BaseHTTPRequestHandler):
    """Answers once a connection and then ends it without a word, as a server does with one that is idle for long."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_connection_that_was_idle_for_long_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Closing) as server:
        threading.Thread(target=server.serve_forever).start()
        client = Client(f"http://127.0.0.1:{server.server_address[1]}", "eh_a_b")
        now = [0.0]
        monkeypatch.setattr("compose.client.time", SimpleNamespace(monotonic=lambda: now[0]))
        assert client.get("readyz") == {}
        now[0] += IDLE_S + 1
        assert client.get("readyz") == {}
        client.close()
        server.shutdown()
