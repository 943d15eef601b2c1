"""A process beside the one that copies: it does with the device what an engine does while its weights travel."""

import os
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import msgspec

KINDS = (
    "kv", "kv at once", "kv creation", "kv mapping", "import", "import by four", "import in one access", "release", "spin",
)  # fmt: skip
"""KV memory made and mapped, in pieces or as one; only created; only mapped; weights imported and mapped; KV given back;
`spin` asks the driver for the device's free memory and nothing else."""
KV_PIECES, KV_BYTES = 37, 350 << 20
_HEAD = struct.Struct("<I")


class Order(msgspec.Struct):
    do: str
    kind: str = ""
    sizes: list[int] = []


class Neighbour:
    """The caller's end. `prepare`, `go`, `took_ms`, `undo`, in this order."""

    def __init__(self, argv: list[str]) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._process = subprocess.Popen([*argv, "--neighbour", str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket.settimeout(60)
        self._word()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(20)

    def prepare(self, kind: str, fds: list[int], sizes: list[int]) -> None:
        self._say(Order("prepare", kind, sizes))
        for at in range(0, len(fds), 100):
            socket.send_fds(self._socket, [b"f"], fds[at : at + 100])
        self._word()

    def go(self) -> None:
        self._say(Order("go"))

    def took_ms(self) -> float:
        return self._word()

    def undo(self) -> None:
        self._say(Order("undo"))
        self._word()

    def _say(self, order: Order) -> None:
        body = msgspec.msgpack.encode(order)
        self._socket.sendall(_HEAD.pack(len(body)) + body)

    def _word(self) -> float:
        data = b""
        while len(data) < 8:
            part = self._socket.recv(8 - len(data))
            if not part:
                raise RuntimeError("the neighbour has died")
            data += part
        return float(struct.unpack("<d", data)[0])


class Engine:
    """What it holds on the device."""

    def __init__(self) -> None:
        from pool.cuda import CudaGpu, access, checked, driver, imported, map_at

        self.gpu, self.driver, self.checked = CudaGpu(0), driver, checked
        self.imported, self.map_at = imported, map_at
        self.rights, self.read_only = access(0, writable=True), access(0, writable=False)
        self.handles: list[Any] = []
        self.mapped: list[tuple[int, int]] = []
        self.places: list[tuple[int, int]] = []
        self.fds: list[int] = []
        self.kind = ""

    def prepare(self, kind: str, fds: list[int], sizes: list[int]) -> None:
        self.kind, self.fds = kind, fds
        if kind.startswith("import"):
            base = self._reserve(sum(sizes))
            self.places = [(base + sum(sizes[:number]), size) for number, size in enumerate(sizes)]
            return
        count = 1 if kind == "kv at once" else KV_PIECES
        size = KV_PIECES * KV_BYTES // count
        base = self._reserve(count * size)
        self.places = [(base + number * size, size) for number in range(count)]
        if kind in {"kv mapping", "release"}:
            self.handles = [self._create(size) for _, size in self.places]
        if kind == "release":
            self._map()

    def go(self) -> None:
        match self.kind:
            case "kv" | "kv at once":
                for place in self.places:
                    self.handles.append(self._create(place[1]))
                    self.map_at(*place, self.handles[-1], self.rights)
                    self.mapped.append(place)
            case "kv creation":
                self.handles = [self._create(size) for _, size in self.places]
            case "kv mapping":
                self._map()
            case "import":
                for place, fd in zip(self.places, self.fds, strict=True):
                    self.handles.append(self.imported(fd))
                    self.map_at(*place, self.handles[-1], self.read_only)
                    self.mapped.append(place)
            case "import by four":
                self._import_by_four()
            case "import in one access":
                self._import_at_once()
            case "release":
                self._release()
            case _:
                for _ in range(200):
                    self.gpu.free_bytes()

    def undo(self) -> None:
        self._release()
        base, size = self.places[0][0], sum(size for _, size in self.places)
        self.checked("free", self.driver.cuMemAddressFree(base, size))
        for fd in self.fds:
            os.close(fd)
        self.fds, self.places = [], []

    def _import_at_once(self) -> None:
        for (address, size), fd in zip(self.places, self.fds, strict=True):
            self.handles.append(self.imported(fd))
            self.checked("map", self.driver.cuMemMap(address, size, 0, self.handles[-1], 0))
            self.mapped.append((address, size))
        size = sum(size for _, size in self.places)
        self.checked("access", self.driver.cuMemSetAccess(self.places[0][0], size, [self.read_only], 1))

    def _import_by_four(self) -> None:
        def one(pair: tuple[tuple[int, int], int]) -> None:
            self.gpu.bind()
            handle = self.imported(pair[1])
            self.map_at(*pair[0], handle, self.read_only)
            self.handles.append(handle)
            self.mapped.append(pair[0])

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(one, zip(self.places, self.fds, strict=True)))

    def _map(self) -> None:
        for place, handle in zip(self.places, self.handles, strict=True):
            self.map_at(*place, handle, self.rights)
            self.mapped.append(place)

    def _release(self) -> None:
        for address, size in self.mapped:
            self.checked("unmap", self.driver.cuMemUnmap(address, size))
        for handle in self.handles:
            self.checked("release", self.driver.cuMemRelease(handle))
        self.mapped, self.handles = [], []

    def _reserve(self, size: int) -> int:
        return int(self.checked("reserve", self.driver.cuMemAddressReserve(size, 2 << 20, 0, 0)))

    def _create(self, size: int) -> Any:
        return self.checked("create", self.driver.cuMemCreate(size, self.gpu.kind, 0))


def serve(sock: socket.socket) -> None:
    """The neighbour's own end, until the other one closes."""
    engine = Engine()
    sock.sendall(struct.pack("<d", 0))
    while (order := _order(sock)) is not None:
        begun = time.monotonic()
        match order.do:
            case "prepare":
                engine.prepare(order.kind, _fds(sock, len(order.sizes)), order.sizes)
            case "go":
                engine.go()
            case _:
                engine.undo()
        sock.sendall(struct.pack("<d", (time.monotonic() - begun) * 1000))


def _order(sock: socket.socket) -> Order | None:
    head = sock.recv(4)
    if not head:
        return None
    size = _HEAD.unpack(head)[0]
    body = b""
    while len(body) < size:
        part = sock.recv(size - len(body))
        if not part:
            return None
        body += part
    return msgspec.msgpack.decode(body, type=Order)


def _fds(sock: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    while len(fds) < count:
        data, got, _, _ = socket.recv_fds(sock, 1, 100)
        if not data:
            raise EOFError
        fds += got
    return fds
