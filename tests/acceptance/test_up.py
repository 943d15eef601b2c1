"""`up` and `down`: what they refuse, what they leave, what they say."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from compose.embedded.nats import EmbeddedNats
from compose.embedded.postgres import EmbeddedPostgres
from compose.remains import belonging
from controlplane.events import InstanceFailed
from controlplane.parties import DECIDER
from controlplane.plane import Login
from pool.place import place
from tests.plane import NODE, PlaneUnderTest, fake

ONE = NODE + fake("alpha")


def _loopback() -> str:
    """IPv6's, where this machine has it."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1"
    except OSError:
        return "127.0.0.1"


LOOPBACK = _loopback()


@pytest.fixture
def stopped() -> Iterator[PlaneUnderTest]:
    """A plane that was never started."""
    plane = PlaneUnderTest(ONE)
    yield plane
    plane.finish()


def test_another_up_is_refused_and_told_who_is_there(plane: PlaneUnderTest) -> None:
    second = plane.cli("up", "--port", "0")
    assert second.returncode == 2
    assert "Another up holds" in second.stderr and "pid" in second.stderr and "down" in second.stderr


@pytest.mark.parametrize("demo", [(), ("--demo",)])
def test_a_port_that_is_taken_is_refused_before_anything_starts(stopped: PlaneUnderTest, demo: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = stopped.cli("up", "--port", str(taken.getsockname()[1]), *demo)
    assert refused.returncode == 2
    assert "--port" in refused.stderr
    assert belonging(stopped.data) == []
    assert not (stopped.data / "models" / "demo").exists()


def test_broken_settings_are_refused_with_their_line(stopped: PlaneUnderTest) -> None:
    stopped.settings_file.write_text(ONE + "priority = 3\n")
    refused = stopped.cli("up", "--port", "0", "--settings", str(stopped.settings_file))
    assert refused.returncode == 2
    line = stopped.settings_file.read_text().splitlines().index("priority = 3") + 1
    assert f"settings.toml:{line}" in refused.stderr and "priority" in refused.stderr


def test_devices_that_come_to_more_than_the_memory_are_refused(stopped: PlaneUnderTest) -> None:
    stopped.settings_file.write_text(ONE.replace('"64MiB"', '"900TiB"'))
    refused = stopped.cli("up", "--port", "0", "--settings", str(stopped.settings_file))
    assert refused.returncode == 2 and "1800 TiB" in refused.stderr


def test_without_a_plane_commands_say_so(tmp_path: Path) -> None:
    for command in ("status", "models", "audit", "events"):
        found = subprocess.run(
            [sys.executable, "-m", "compose", "--data", str(tmp_path / "d"), command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode in (1, 2), command
        assert "up" in found.stderr and "Traceback" not in found.stderr, command


async def test_down_ends_all_of_it_the_log_says_so_and_a_second_down_finds_nothing(
    start_plane: Callable[..., PlaneUnderTest],
) -> None:
    plane = start_plane(ONE)
    assert plane.cli("load", "alpha").returncode == 0
    assert len(belonging(plane.data)) >= 9
    instance = (await plane.serving("alpha")).instance
    ended = plane.cli("down")
    assert ended.returncode == 0 and "ended in" in ended.stdout
    assert plane.down() == 0
    assert belonging(plane.data) == []
    assert "nothing was running" in plane.cli("down").stdout
    assert plane.cli("status").returncode == 1
    over = datetime.now(UTC)
    plane.start()
    [left] = await plane.events("NodeLeft")
    told = [one for one in await plane.events() if one.command == left.command]
    assert [one.type for one in told] == ["NodeLeft", "InstanceEnded", "GrantReturned", "WeightsDropped"]
    assert told[1].stream == f"instance:{instance}"
    then = plane.cli("status", "--at", over.isoformat(timespec="milliseconds").replace("+00:00", "Z"), "--json")
    [alpha], [node] = (json.loads(then.stdout)[name] for name in ("models", "nodes"))
    assert (alpha["state"], node["heard"], node["left"]) == ("cold", False, True), "as it was meanwhile"
    assert plane.cli("load", "alpha").returncode == 0, "what the log says of it is still true"
    assert not await plane.events("InstanceFailed"), "nothing was lost: it was ended"
    assert plane.cli("audit").returncode == 0


async def test_down_ends_a_plane_whose_decider_hears_nothing_and_its_next_worker_says_what_is_lost(
    start_plane: Callable[..., PlaneUnderTest],
) -> None:
    plane = start_plane(ONE)
    assert plane.cli("load", "alpha").returncode == 0
    instance = (await plane.serving("alpha")).instance
    os.kill(plane.child("decider").pid, signal.SIGSTOP)
    assert plane.cli("down").returncode == 0
    assert plane.down() == 0
    assert belonging(plane.data) == []
    plane.start()

    async def found() -> list[InstanceFailed]:
        return [one.event for one in await plane.events("InstanceFailed") if isinstance(one.event, InstanceFailed)]

    [lost] = await plane.until(found, "the next worker has looked")
    assert not await plane.events("NodeLeft")
    assert (lost.instance, lost.code) == (instance, "lost")
    assert plane.cli("load", "alpha").returncode == 0


def test_down_clears_what_a_killed_up_has_left(start_plane: Callable[..., PlaneUnderTest]) -> None:
    plane = start_plane(ONE)
    assert plane.cli("load", "alpha").returncode == 0
    plane.kill_up()
    assert belonging(plane.data) != []
    assert plane.cli("down").returncode == 0
    assert belonging(plane.data) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="all of this runs as an ordinary user already")
async def test_an_ordinary_user_runs_a_plane_that_serves(tmp_path: Path) -> None:
    user = pwd.getpwnam("nobody").pw_uid
    if not _runs_python(user):
        pytest.skip(f"user {user} can't run {sys.executable}")
    plane = PlaneUnderTest(ONE, user=user, environment={"HOME": str(tmp_path)})
    plane.start()
    assert "alpha" in await plane.chat("alpha", "alpha")
    assert (plane.data / "pg" / "data").stat().st_uid == user, "its Postgres is its own, and in its directory"
    plane.finish()
    mine = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _runs_below(entry, plane.data)]
    assert mine == []


def _runs_python(user: int) -> bool:
    probe = [sys.executable, "-c", "import compose.up"]
    try:
        return subprocess.run(probe, user=user, group=user, extra_groups=[], capture_output=True, check=False).returncode == 0
    except PermissionError:  # an interpreter in root's home
        return False


def _runs_below(process: Path, data: Path) -> bool:
    try:
        return os.fsencode(data) in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_its_children_have_nothing_of_its_own(plane: PlaneUnderTest) -> None:
    up = plane.up_pid
    for name, program in (
        ("web", "web.server"), ("decider", "controlplane.decider"), ("pool", "pool.daemon"), ("worker", "worker.agent")
    ):  # fmt: skip
        process = Path(f"/proc/{plane.child(name).pid}")
        assert f"-m\0{program}\0" in (process / "cmdline").read_text()
        parent, _, session = (process / "stat").read_text().rpartition(")")[2].split()[1:4]
        assert (int(parent), session) == (up, process.name), name
        opened = {where for descriptor in (process / "fd").iterdir() if (where := _where(descriptor))}
        assert not opened & {str(plane.data / "lock"), str(plane.data / "logs" / "up.log"), str(plane.data / "up.out")}, name


def _where(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _pool(plane: PlaneUnderTest) -> dict[str, Any]:
    """What `status` says of it."""
    found = json.loads(plane.cli("status", "--json").stdout)
    return next(one for one in found["processes"] if one["name"] == "pool")  # type: ignore[no-any-return]


async def test_a_child_that_was_killed_is_shown_and_back(plane: PlaneUnderTest) -> None:
    before = _pool(plane)["restarts"]
    plane.kill(plane.child("pool"))

    async def back() -> bool:
        pool = _pool(plane)
        return bool(pool["restarts"] == before + 1 and pool["state"] == "ready" and pool["last_exit"] == "killed by SIGKILL")

    await plane.until(back, "the pool is back")


async def test_models_load_again_after_the_pools_directory_was_removed(plane: PlaneUnderTest) -> None:
    assert plane.cli("load", "alpha").returncode == 0
    before = plane.child("pool")
    segments = place(Path(plane.plane.pool_socket).parent, plane.plane.pool_bytes)
    shutil.rmtree(segments.rename(segments.with_name(f"{segments.name}-removed")))  # at once, whatever is just written there
    assert plane.cli("load", "beta").returncode == 0, "that waits for the next daemon"
    assert plane.child("pool") != before
    for model in ("alpha", "beta"):
        assert await plane.chat(model, "hello")

    async def ready() -> bool:
        return bool(_pool(plane)["state"] == "ready")

    await plane.until(ready, "the next pool is ready")
    assert _pool(plane)["last_exit"] == "exit code 3"


def test_doctor_is_content_with_this_machine(plane: PlaneUnderTest) -> None:
    found = plane.cli("doctor", "--json")
    assert found.returncode == 0, found.stdout
    assert {"python", "disk", "postgres", "nats", "shared memory", "namespaces", "devices", "port"} <= {
        one["name"] for one in json.loads(found.stdout)
    }


def test_tokens_are_issued_listed_and_revoked(plane: PlaneUnderTest) -> None:
    issued = json.loads(plane.cli("token", "new", "somebody", "--json").stdout)
    identifier = issued["token"].split("_")[1]
    assert issued["id"] == identifier
    rows = json.loads(plane.cli("token", "list", "--json").stdout)
    assert (rows[-1]["id"], rows[-1]["name"], rows[-1]["scope"]) == (identifier, "somebody", "inference")
    assert plane.cli("token", "revoke", identifier).returncode == 0
    assert plane.cli("token", "revoke", identifier).returncode == 1


async def test_given_servers_are_used_and_none_started(start_plane: Callable[..., PlaneUnderTest]) -> None:
    home = PlaneUnderTest(ONE)  # a directory for the servers
    ours = {DECIDER: Login(user="me", password="every@thing")}
    async with EmbeddedPostgres(home.data, durable=False) as postgres, EmbeddedNats(home.data / "nats", logins=ours) as nats:
        url = nats.url.replace("nats://", "nats://me:every%40thing@")
        plane = start_plane(ONE, "--postgres", postgres.owner_url, "--nats", url, "--host", LOOPBACK)
        assert plane.url == (f"http://[::1]:{plane.plane.web_port}" if LOOPBACK == "::1" else plane.url)
        names = {one["name"] for one in json.loads(plane.cli("status", "--json").stdout)["processes"]}
        assert names == {"pool", "decider", "worker", "web"}
        assert "alpha" in await plane.chat("alpha", "alpha")
        assert plane.cli("audit").returncode == 0
        plane.down()
    home.finish()
