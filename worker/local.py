"""One instance as this worker has it in hands: its directory, its holder and frontend, and what is known of it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
from msgspec.structs import replace

from pool.client import Attachment
from worker import processes, ranks
from worker.cuda.operation import Operation, not_wanted
from worker.engines.messages import Checked, ControlCommand, Fault, State, Stocked
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderGone, HolderLink
from worker.images.reading import Reading
from worker.instancedir import InstanceDir, Record
from worker.moves import EngineState, Observed
from worker.processes import Process
from worker.service import Service
from worker.shelf import Shelved
from worker.site import Site

AGAIN_S: Final = 1.0
"""Before another watch for a process's end, where that could not be watched for."""

log = structlog.get_logger("instance")


class LocalInstance:
    """`seen` is what the instance is like; every step that changes it writes here what it found afterwards.

    `poke` is called whenever something happens by itself (a process ends).
    """

    def __init__(self, site: Site, instance: str, poke: Callable[[], None]) -> None:
        self.site = site
        self.directory = InstanceDir(site.instances, instance)
        self.holder = HolderLink(self.directory)
        self.frontend = Service(site.plane, site.caller, self.directory)
        self.seen = Observed()
        self.engine_state: State | None = None
        """The engine's last word."""
        self.kv_bytes = 0
        """What it said of its KV when it was last awake."""
        self.shelved: Shelved | None = None
        """The source that `seen.prepared` is about."""
        self.lost: tuple[str, str] | None = None
        """Code and sentence, once a process that the instance can't do without has ended by itself."""
        self.ending = False
        """Set while processes are ended on purpose: their ends are no news."""
        self.moved = False
        """Set when the frontend had to be started on another port than the plane was told."""
        self.restored_from: str | None = None
        """The image from which the engine came back in this climb."""
        self.reading: Reading | None = None
        """Of the image that a restore will be from."""
        self.filling: Attachment | None = None
        """The set that the pool has on the device for an engine that is still on its way there."""
        self.readying: asyncio.Task[Operation] | None = None
        """A step process that will put the engine back on its GPU."""
        self.host_bytes = 0
        """What it takes of the host at `checkpoint`, as last measured."""
        self.weighed_s = 0.0
        """When that was (monotonic)."""
        self.restaged = 0
        """How often the staged set had left the pool before it was attached."""
        self._poke = poke
        self._watches: dict[str, asyncio.Task[None]] = {}

    @property
    def instance(self) -> str:
        return self.directory.instance

    @property
    def record(self) -> Record:
        """What is on disk. Raises FileNotFoundError when it is gone."""
        record = self.directory.read()
        if record is None:
            raise FileNotFoundError(self.directory.path)
        return record

    def note(self, **changes: Any) -> None:
        """Take in what a step found."""
        self.seen = replace(self.seen, **changes)

    async def tell(self, command: ControlCommand, deadline_s: float) -> State:
        """Have the engine do something and return its word. Raises StepFailed with the engine's or the holder's code."""
        match reply := await self.ask(command, deadline_s):
            case State():
                return await asyncio.to_thread(self._measured, reply)
            case Checked() | Stocked():
                raise StepFailed("protocol", f"the engine answered {type(command).__name__} with {type(reply).__name__}")

    async def ask(self, command: ControlCommand, deadline_s: float) -> State | Checked | Stocked:
        """The engine's answer, of whatever kind. Raises StepFailed as `tell`."""
        try:
            reply = await self.holder.tell(command, deadline_s)
        except HolderGone as error:
            raise StepFailed("holder_died", str(error)) from error
        except HolderDenied as error:
            raise StepFailed("engine_died" if error.code == "not_connected" else error.code, error.message) from error
        if isinstance(reply, Fault):
            raise StepFailed(reply.code, f"{type(command).__name__}: {reply.message}")
        return reply

    def _measured(self, state: State) -> State:
        """What the driver says of an engine's memory on its GPU; the engine can't know by which pid the driver knows it."""
        record = self.directory.read()
        if record is None or record.engine is None or not self.site.is_gpu(record.device):
            return state
        used = ranks.used_bytes(record)
        return state if used is None else replace(state, bytes_private=used, bytes_device=used)

    def take(self, state: State) -> None:
        """Believe the engine's word of itself (its memory is measured apart)."""
        self.engine_state = state
        if state.awake:
            self.kv_bytes = state.bytes_kv
        self.note(attached=state.attached, awake=state.awake, loaded=bool(state.bytes_own))

    def watch(self, role: str, process: Process) -> None:
        """Be told when a process ends."""
        if (old := self._watches.get(role)) is not None:
            old.cancel()
        self._watches[role] = asyncio.create_task(self._watched(role, process), name=f"{self.instance}:{role}")

    def watched(self, role: str) -> bool:
        """Whether a process of that role is there, and its end would be heard of."""
        return role in self._watches

    def unwatch(self, role: str) -> None:
        """A process's end is meant."""
        if (task := self._watches.pop(role, None)) is not None:
            task.cancel()

    async def _watched(self, role: str, process: Process) -> None:
        """Nothing else tells of an end, so nothing that goes wrong ends the watch (descriptors may have run out)."""
        while True:
            try:
                await self._until_ended(role, process)
            except Exception:
                log.exception("watch_failed", instance=self.instance, role=role, pid=process.pid, again_s=AGAIN_S)
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def _until_ended(self, role: str, process: Process) -> None:
        await processes.gone(process)
        if self.ending:
            return
        match role:
            case "frontend":
                self.note(frontend=False, serving=None)
            case "holder":
                self.lost = ("holder_died", f"the holder (pid {process.pid}) ended by itself, and the engine with it")
                self.note(holder=False, engine=EngineState.DEAD)
            case _:
                await self._engine_died(process)
        self._poke()

    async def _engine_died(self, process: Process) -> None:
        early = self.seen.engine is EngineState.STARTING
        try:
            held = await self.holder.ask()
        except (HolderGone, HolderDenied):
            self.lost = ("holder_died", "the holder ended by itself, and the engine with it")
        else:
            how = f"status {held.exit.status}" if held.exit else "an unknown status"
            words = self.directory.last_words()
            message = f"the engine (pid {process.pid}) ended with {how}" + (f"; its last words: {words}" if words else "")
            self.lost = ("start_failed" if early else "engine_died", message)
        self.note(engine=EngineState.DEAD, awake=False, attached=None)

    def unfill(self) -> None:
        """The pool need not keep the set on the device any longer: the engine has mapped it, or will not."""
        if self.filling is not None:
            self.filling.close()
        self.filling = None
        self.note(filled=None)

    def stand_down(self) -> None:
        """A step process that was got ready is not wanted after all."""
        if self.readying is not None:
            not_wanted(self.readying)
        self.readying = None

    def forget(self) -> None:
        """Stop watching."""
        self.unfill()
        self.stand_down()
        for task in self._watches.values():
            task.cancel()
        self._watches.clear()

    @property
    def logs(self) -> Path:
        return self.site.data / "logs" / "engines"
