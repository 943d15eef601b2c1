"""The vLLM engine on a pretended GPU: the same orders, the same talk with the pool, memory taken and given back as there.

What it says follows from the bytes of the weights that are mapped and from the prompt, so an answer tells whose weights it was.
"""

import mmap
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from pool.devicelink import DeviceAttachment, attach_device, deposit, find
from pool.layout import lay_out
from pool.messages import Attached, Deposit, Tensor
from pool.native import Native, Span, compare
from pool.safetensors import Source, read_source
from tests.fakegpu import MIB
from tests.standin.install import place
from tests.standin.room import DeviceFull, Room, Taker
from worker.engines.interface import IDLE, EngineFault, Output, Stepped
from worker.engines.messages import Sampling, State, Stocked
from worker.engines.vllm_faults import faults

SKELETON_BYTES = 6 * MIB
SHARE = 2 * MIB
"""Segments are multiples of it."""
LETTERS = 94
"""Ids 0 to 93 are printable in the byte tokenizer of tests."""
CHECK = "check"
GRAPHS = 3
"""Captured by its start, and never again."""
DIES_ASLEEP = "dies-asleep"
"""While a file of this name is beside the devices' files, engines die of being put to sleep."""
HOLDS = "holds"
"""While a file of this name is there, engines have begun what they run and say nothing more of it."""


class VllmEngine:
    def __init__(self, source: Path, arguments: dict[str, Any], *, device: str, bare: bool = False, **_: Any) -> None:
        room = Room(place())
        if device not in room.devices:
            raise SystemExit(f"this machine has no GPU {device!r}")
        self._device, self._arguments = device, arguments
        self._native = _native(self._read(str(source)))
        self._skeleton, self._own, self._kv = (Taker(room, device) for _ in range(3))
        _take(self._skeleton, SKELETON_BYTES)
        _take(self._own, self._size)
        _take(self._kv, self._kv_bytes)
        self._source = "" if bare else str(source)
        self._kv.give(self._kv.size)
        self._attachment: DeviceAttachment | None = None
        self._weights = b""
        self._awake = False
        self._running: dict[str, tuple[Sampling, bytes, int]] = {}

    def _read(self, source: str) -> dict[str, Source]:
        """By what stands before the names of their tensors."""
        draft = self._arguments.get("draft_model")
        return {"": read_source(source)} | ({"draft.": read_source(draft)} if draft else {})

    @property
    def _size(self) -> int:
        return sum(self._native.segments)

    @property
    def _kv_bytes(self) -> int:
        return int(self._arguments.get("kv_bytes", 16 * MIB))

    def stage(self, pool_socket: str, source: str, form: str) -> Stocked:
        begun = time.monotonic()
        if self._attachment is not None:
            raise EngineFault("busy", "sleep and detach first")
        with faults(pool_socket, self._device):
            if (known := find(pool_socket, source, form)) is not None:
                return Stocked(weight_set=known, size_bytes=self._size, read_bytes=0)
            if not self._own.size:
                _take(self._own, self._size)
            self._source = source
            read = self._read(source)
            request = Deposit(
                source=source, form=form, segments=self._native.segments, host_segments=0, tensors=_native(read).tensors
            )
            staged = deposit(pool_socket, request, lambda fds: _write(read, self._native, fds))
        took_ms = (time.monotonic() - begun) * 1000
        return Stocked(
            weight_set=staged.weight_set, size_bytes=staged.size_bytes, read_bytes=staged.read_bytes, took_ms=took_ms
        )

    def attach(self, pool_socket: str, weight_set: str) -> None:
        if self._attachment is not None:
            if self._attachment.attached.weight_set == weight_set:
                return
            if not self._awake:
                raise EngineFault("busy", "detach first")
            self._must_rest()
            self._unmap()
            self._awake = False
            self._map(pool_socket, weight_set)
            self._awake = True
            return
        self._map(pool_socket, weight_set)

    def _map(self, pool_socket: str, weight_set: str) -> None:
        self._own.give(self._own.size)
        maps: list[mmap.mmap] = []

        def map_them(attached: Attached, fds: list[int]) -> None:
            compare(self._native, attached)
            maps.extend(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ) for fd in fds)
            if not self._kv.size:
                _take(self._kv, self._kv_bytes)

        try:
            with faults(pool_socket, self._device):
                self._attachment = attach_device(pool_socket, weight_set, self._device, map_them)
            self._attachment.close_fds()
            digest = blake3()
            for one in maps:
                digest.update(one)
            self._weights = digest.digest()
        except BaseException:
            self._kv.give(self._kv.size)
            raise
        finally:
            for one in maps:
                one.close()

    def detach(self) -> None:
        if self._awake:
            raise EngineFault("busy", "awake: put it to sleep first")
        self._kv.give(self._kv.size)
        self._own.give(self._own.size)
        self._unmap()

    def _unmap(self) -> None:
        if self._attachment is not None:
            attachment, self._attachment = self._attachment, None
            attachment.release()

    def wake(self, model: str) -> None:
        if self._attachment is None:
            raise EngineFault("not_attached", f"no weight set is mapped for {model}")
        if not self._kv.size:
            _take(self._kv, self._kv_bytes)
        self._awake = True

    def sleep(self) -> None:
        self._must_rest()
        if (place() / DIES_ASLEEP).exists():
            os._exit(139)
        self._kv.give(self._kv.size)
        self._awake = False

    def _must_rest(self) -> None:
        if self._running:
            raise EngineFault("busy", f"{len(self._running)} requests run: drain first")

    def submit(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        if not self._awake:
            raise EngineFault("not_awake", "asleep")
        if len(prompt) >= int(self._arguments["max_model_len"]):
            raise EngineFault("too_long", f"a prompt of {len(prompt)} tokens")
        said = blake3(self._weights + msgspec.json.encode(prompt)).digest(length=sampling.max_tokens)
        self._running[request] = (sampling, said, 0)

    def abort(self, request: str) -> bool:
        return self._running.pop(request, None) is not None

    def check(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        self._must_rest()
        self.submit(CHECK, prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
        ids: tuple[int, ...] = ()
        while CHECK in self._running:
            ids += tuple(i for output in self.step().outputs for i in output.ids)
        return ids

    def step(self) -> Stepped:
        if not self._running:
            return IDLE
        if (place() / HOLDS).exists():
            return Stepped((), 0.01)
        outputs = []
        for request, (sampling, said, count) in list(self._running.items()):
            last = count + 1 == len(said)
            outputs.append(Output(request, (said[count] % LETTERS,), "length" if last else None))
            if last:
                del self._running[request]
            else:
                self._running[request] = (sampling, said, count + 1)
        return Stepped(tuple(outputs), 0.0005 if self._running else None)

    def scrub(self) -> None:
        if self._awake or self._attachment is not None:
            raise EngineFault("busy", "weights or KV memory are there still: sleep and detach first")

    def revived(self) -> None: ...

    def running(self) -> int:
        return len(self._running)

    def state(self) -> State:
        attached = self._attachment.attached.weight_set if self._attachment is not None else None
        return State(
            attached=attached, awake=self._awake, running=len(self._running), bytes_mapped=self._size if attached else 0,
            bytes_kv=self._kv.size, bytes_own=self._own.size, bytes_private=0, graphs=GRAPHS,
        )  # fmt: skip


def _take(taker: Taker, size: int) -> None:
    try:
        taker.take(size)
    except DeviceFull as error:
        raise EngineFault("no_memory", str(error)) from error


def _native(sources: dict[str, Source]) -> Native:
    layout = lay_out(
        msgspec.structs.replace(entry, name=before + entry.name) for before, read in sources.items() for entry in read.entries
    )
    spans, address = [], SHARE
    for size in layout.segments:
        spans.append(Span(address, -(-size // SHARE) * SHARE))
        address = spans[-1].end
    tensors = tuple(
        Tensor(
            name=one.entry.name, dtype=one.entry.dtype, shape=one.entry.shape, segment=one.segment, offset=one.offset,
            size_bytes=one.entry.size_bytes,
        )
        for one in layout.tensors
    )  # fmt: skip
    return Native(tuple(spans), 0, tensors, {})


def _write(sources: dict[str, Source], native: Native, fds: list[int]) -> None:
    entries = {before + entry.name: (read, entry) for before, read in sources.items() for entry in read.entries}
    for tensor in native.tensors:
        source, entry = entries[tensor.name]
        with (Path(source.path) / source.files[entry.file].name).open("rb") as file:
            file.seek(entry.offset)
            os.pwrite(fds[tensor.segment], file.read(entry.size_bytes), tensor.offset)
