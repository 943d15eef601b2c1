"""The embedded servers: fresh and again, after kills, and what they refuse."""

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from compose.embedded import cluster as cluster_module
from compose.embedded import nats as nats_module
from compose.embedded import postgres as postgres_module
from compose.embedded import process as process_module
from compose.embedded.cluster import Cluster
from compose.embedded.nats import EmbeddedNats
from compose.embedded.postgres import EmbeddedPostgres
from compose.embedded.process import room
from compose.embedded.refusal import ServerRefusal
from controlplane.plane import Login
from tests.servers import freeze


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eh-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def postgres_in(directory: Path) -> EmbeddedPostgres:
    return EmbeddedPostgres(directory / "p", home=directory / "pg", durable=False)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def write(server: EmbeddedPostgres, number: int) -> None:
    connection = await asyncpg.connect(server.owner_url)
    await connection.execute("create table if not exists kept (n integer)")
    await connection.execute("insert into kept values ($1)", number)
    await connection.close()


async def kept(server: EmbeddedPostgres) -> list[int]:
    connection = await asyncpg.connect(server.url)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("drop table kept")
    await connection.close()
    owner = await asyncpg.connect(server.owner_url)
    rows = await owner.fetch("select n from kept order by n")
    await owner.close()
    return [row["n"] for row in rows]


async def test_postgres_keeps_its_data_over_an_end_in_order_a_kill_and_an_orphan(directory: Path) -> None:
    server = postgres_in(directory)
    await server.start()
    await write(server, 1)
    await server.stop()
    await server.start()
    assert server.process is not None
    await write(server, 2)
    os.kill(server.process.pid, signal.SIGKILL)
    assert await server.exited() == -signal.SIGKILL
    await server.start()
    await write(server, 3)
    orphan = server.process
    async with postgres_in(directory) as successor:  # the one before it is still running, and nobody's
        assert await kept(successor) == [1, 2, 3]
        assert not orphan.alive


async def test_postgres_is_closed_to_all_but_us(directory: Path) -> None:
    async with postgres_in(directory) as server:
        cluster = server.cluster
        assert {mode(cluster.home), mode(cluster.run), mode(cluster.data)} == {0o700}
        owner = await asyncpg.connect(server.owner_url)
        assert await owner.fetchval("show listen_addresses") == ""
        assert await owner.fetchval("show data_checksums") == "on"
        rules = await owner.fetch("select type, auth_method from pg_hba_file_rules")
        assert {(row["type"], row["auth_method"]) for row in rules} == {("local", "peer"), ("host", "scram-sha-256")}
        await owner.close()


async def test_data_of_another_major_version_is_refused(directory: Path) -> None:
    server = postgres_in(directory)
    server.cluster.data.mkdir(parents=True)
    (server.cluster.data / "PG_VERSION").write_text("14\n")
    with pytest.raises(ServerRefusal, match=r"written by Postgres 14; the installed one is 18") as refusal:
        await server.start()
    assert refusal.value.code == "data_of_other_major"


async def test_a_server_that_ends_at_its_start_says_why(directory: Path) -> None:
    postgres = postgres_in(directory)
    postgres.cluster.prepare()
    postgres.cluster.data.mkdir(mode=0o700)
    (postgres.cluster.data / "PG_VERSION").write_text(f"{postgres.cluster.program_major()}\n")  # and nothing else
    for path in (postgres.cluster.data, postgres.cluster.data / "PG_VERSION"):
        postgres.cluster.give(path)
    with pytest.raises(ServerRefusal) as refused:
        await postgres.start()
    assert refused.value.code == "not_starting"
    assert "ended with status" in refused.value.message and "postgresql.conf" in refused.value.message
    assert "server.log" in refused.value.cure


async def test_a_cluster_that_cannot_be_made_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = directory / "bin"
    programs.mkdir(mode=0o755)
    real = postgres_in(directory).cluster.programs
    (programs / "postgres").symlink_to(real / "postgres")
    (programs / "initdb").symlink_to("/bin/false")
    monkeypatch.setattr("compose.embedded.programs.programs", lambda account, home: programs)
    with pytest.raises(ServerRefusal) as refused:
        await postgres_in(directory).start()
    assert refused.value.code == "not_starting" and "initdb ended with status 1" in refused.value.message


async def test_a_half_made_cluster_is_made_again(directory: Path) -> None:
    server = postgres_in(directory)
    (server.cluster.home / "data.new").mkdir(parents=True)
    (server.cluster.home / "data.new" / "junk").touch()
    async with server:
        await write(server, 1)
    assert not list(server.cluster.home.rglob("junk"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's cluster lives outside the data directory")
async def test_a_new_directory_of_an_old_path_starts_empty_and_deletes_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "ROOT_HOME", directory / "var")
    data = directory / "data"
    first = Cluster.of(data)
    first.prepare()
    (first.home / "precious").touch()
    again = Cluster.of(data)
    again.prepare()
    assert (again.home / "precious").exists()
    shutil.rmtree(data)
    fresh = Cluster.of(data)
    fresh.prepare()
    assert not (fresh.home / "precious").exists()
    assert len(list((directory / "var").glob("*.left-*/precious"))) == 1


def test_a_path_too_long_for_a_socket_is_refused(directory: Path) -> None:
    with pytest.raises(ServerRefusal, match="107") as refusal:
        Cluster.of(directory, directory / ("x" * 90))
    assert refusal.value.code == "path_too_long"


def test_a_full_disk_is_refused_with_both_numbers(directory: Path) -> None:
    with pytest.raises(ServerRefusal, match=r"iB free; the log needs at least 1\.0 TiB") as refusal:
        room(directory, need_bytes=1 << 40)
    assert refusal.value.code == "disk_full"
    assert process_module.ROOM_BYTES == 1 << 30


async def test_nats_keeps_port_and_token_over_a_kill_and_ends_its_orphan(directory: Path) -> None:
    server = EmbeddedNats(directory / "nats")
    await server.start()
    port = server.port
    assert mode(directory / "nats") == 0o700
    assert mode(directory / "nats" / "nats.conf") == 0o600
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGKILL)
    assert await server.exited() == -signal.SIGKILL
    await server.start()
    assert server.port == port
    orphan = server.process
    async with EmbeddedNats(directory / "nats", token=server.token) as successor:
        assert not orphan.alive
        assert await nats_module.check(successor.url) >= "2.12"


async def test_a_server_that_is_stopped_does_not_answer_and_one_that_goes_on_does(directory: Path) -> None:
    async with postgres_in(directory) as postgres, EmbeddedNats(directory / "n") as nats:
        for server in (postgres, nats):
            assert await server.answers(30)
            assert server.process is not None
            await freeze(server.process.pid)
            assert not await server.answers(0.5)
            server.process.popen.send_signal(signal.SIGCONT)
            assert await server.answers(30)
            server.process.popen.kill()
            await server.exited()
            assert not await server.answers(30), "at once"


async def test_nats_with_logins_answers_as_well(directory: Path) -> None:
    async with EmbeddedNats(directory / "n", logins={"reader": Login(user="reader", password="word")}) as nats:
        assert await nats.answers(30)


async def test_a_taken_port_is_refused(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerRefusal) as refusal:
            await EmbeddedNats(directory / "nats", port=taken.getsockname()[1]).start()
    assert refusal.value.code == "port_taken"


@pytest.mark.parametrize(
    ("greeting", "code"),
    [
        (b'INFO {"version":"2.11.9","jetstream":true}\r\n', "nats_too_old"),
        (b'INFO {"version":"2.12.0"}\r\n', "no_jetstream"),
        (b'INFO {"version":"2.12.0","jetstream":true,"max_payload":65536}\r\n', "payload_too_small"),
        (b"SSH-2.0-OpenSSH\r\n", "not_answering"),
    ],
)
async def test_a_given_nats_that_will_not_do_is_refused(greeting: bytes, code: str) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ServerRefusal) as refusal:
        await nats_module.check(f"nats://127.0.0.1:{port}")
    assert refusal.value.code == code
    server.close()


async def test_a_given_postgres_is_checked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerRefusal) as refusal:
        await postgres_module.check(f"postgresql://u@/d?host={directory}")
    assert refusal.value.code == "not_answering"
    async with postgres_in(directory) as server:
        assert await postgres_module.check(server.url) == 18
        monkeypatch.setattr(postgres_module, "OLDEST", 19)
        with pytest.raises(ServerRefusal, match=r"version 18; 19 is the oldest") as refusal:
            await postgres_module.check(server.url)
        assert refusal.value.code == "postgres_too_old"
