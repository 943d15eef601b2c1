"""A server that `up` keeps running: what is shown of its end."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from compose import serverchild
from compose.embedded import process
from compose.embedded.process import ServerProcess
from compose.embedded.refusal import ServerRefusal
from compose.serverchild import Server, ServerChild


class Played:
    """Ends when it is told to, and starts again when it may."""

    def __init__(self) -> None:
        self.process: Any = None
        self.refusals = 0
        self.ends = asyncio.Queue[int]()

    async def start(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ServerRefusal("disk_full", "The disk is full.", "Make room.")
        self.process = SimpleNamespace(pid=7, alive=True, stop=self.killed)

    async def answers(self, deadline_s: float) -> bool:
        return True

    async def killed(self, _steps: object) -> None:
        self.ends.put_nowait(-9)

    async def exited(self) -> int:
        return await self.ends.get()

    async def stop(self) -> None:
        self.ends.put_nowait(0)


async def test_a_server_that_outlives_its_kill_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerProcess(["sleep", "600"], log=tmp_path / "log")
    with monkeypatch.context() as stuck:
        stuck.setattr(process, "KILL_S", 0.05)
        stuck.setattr(server.popen, "kill", lambda: None)
        with pytest.raises(ServerRefusal, match="outlives SIGKILL") as refused:
            async with asyncio.timeout(30):
                await server.stop([])
    assert refused.value.code == "not_ending"
    assert await server.stop([]) == -9


async def until(child: ServerChild, state: str, restarts: int) -> None:
    async with asyncio.timeout(20):
        while (child.state.state, child.state.restarts) != (state, restarts):
            await asyncio.sleep(0.005)


async def test_why_it_was_killed_is_shown_until_it_ends_again_however_often_its_start_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serverchild, "BACK_OFF_S", (0.01, 0.02))
    shown: list[tuple[str, str]] = []
    server = Played()
    child = ServerChild("postgres", cast(Server, server), lambda: shown.append((child.state.state, child.state.last_exit)))
    await child.start()
    server.refusals = 2
    await child.give_up("gave no answer for 61 s")
    await until(child, "ready", 3)
    why = "killed: it gave no answer for 61 s"
    assert child.state.last_exit == why
    refused = f"{why}; can't be started again: The disk is full. Make room."
    assert shown == [("ready", ""), ("waiting", why), ("waiting", refused), ("waiting", refused), ("ready", why)]
    for restarts, (code, shown_as) in enumerate(((3, "exit code 3"), (-40, "killed by signal 40")), 4):
        server.ends.put_nowait(code)
        await until(child, "ready", restarts)
        assert child.state.last_exit == shown_as
    await child.stop()


async def test_a_server_is_kept_through_faults_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serverchild, "BACK_OFF_S", (0.01, 0.02))
    monkeypatch.setattr(serverchild, "SEEN_AGAIN_S", 0.01)
    server, faults = Played(), [OSError(24, "too many open files")] * 2
    start, exited = server.start, server.exited

    async def breaks() -> None:
        if server.refusals:
            server.refusals -= 1
            raise ValueError("a fault of ours")
        await start()

    async def unseen() -> int:
        if faults:
            raise faults.pop()
        return await exited()

    monkeypatch.setattr(server, "start", breaks)
    monkeypatch.setattr(server, "exited", unseen)
    child = ServerChild("nats", cast(Server, server), lambda: None)
    await child.start()
    server.refusals = 2
    server.ends.put_nowait(1)
    await until(child, "ready", 3)
    assert faults == []
    await child.stop()


@pytest.mark.parametrize(
    ("fault", "shown"),
    [(None, "exit code 0"), (OSError(24, "too many open files"), "its end was not seen: OSError(24, 'too many open files')")],
)
async def test_an_end_that_was_not_seen_is_shown_as_no_success(
    monkeypatch: pytest.MonkeyPatch, fault: OSError | None, shown: str
) -> None:
    server, told = Played(), list[tuple[str, str]]()
    exited = server.exited

    async def unseen() -> int:
        code = await exited()
        if fault is not None:
            raise fault
        return code

    monkeypatch.setattr(server, "exited", unseen)
    child = ServerChild("postgres", cast(Server, server), lambda: told.append((child.state.state, child.state.last_exit)))
    await child.start()
    assert await child.stop()
    assert told == [("ready", ""), ("stopped", shown)]
