"""The parts of a stand-in engine that goes over several devices: a process for each, told as one.

One that ends takes the engine's process with it; they die with it, too. `python -m tests.standin.parts` is one of them.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from multiprocessing.connection import wait
from typing import Any

import msgspec

from pool.ranks import JOINT
from tests.standin.part import Brought, Part
from worker import tether
from worker.engines.interface import EngineFault


class Said(msgspec.Struct, frozen=True):
    size: int = 0
    own_bytes: int = 0
    kv_bytes: int = 0
    graphs: int = 0
    attached: str | None = None
    weights: str = ""
    brought: Brought | None = None
    code: str = ""
    """It failed."""
    message: str = ""


class Parts:
    """With the face of a `Part`."""

    def __init__(self, source: str, arguments: dict[str, Any], devices: list[str]) -> None:
        argv = [sys.executable, "-P", "-m", "tests.standin.parts", source, json.dumps(arguments), *devices, "--rank"]
        self._ranks = [
            subprocess.Popen([*argv, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for rank in range(len(devices))
        ]
        self._pidfds = [os.pidfd_open(rank.pid) for rank in self._ranks]
        threading.Thread(target=self._watch, daemon=True).start()
        self._said = self._ask("look")

    @property
    def size(self) -> int:
        return sum(one.size for one in self._said)

    @property
    def own_bytes(self) -> int:
        return sum(one.own_bytes for one in self._said)

    @property
    def kv_bytes(self) -> int:
        return sum(one.kv_bytes for one in self._said)

    @property
    def graphs(self) -> int:
        return sum(one.graphs for one in self._said)

    @property
    def attached(self) -> str | None:
        names = [one.attached for one in self._said]
        return JOINT.join(name or "" for name in names) if any(names) else None

    @property
    def weights(self) -> bytes:
        return b"".join(bytes.fromhex(one.weights) for one in self._said)

    def bring(self, pool_socket: str, source: str, form: str) -> Brought:
        found = [one.brought for one in self._ask("bring", pool_socket, source, form) if one.brought is not None]
        return Brought(JOINT.join(one.weight_set for one in found), sum(one.read_bytes for one in found))

    def map(self, pool_socket: str, weight_set: str) -> None:
        try:
            self._ask("map", pool_socket, weight_set)
        except EngineFault:
            self._ask("unmap")
            self._ask("drop_kv")
            raise

    def unmap(self) -> None:
        self._ask("unmap")

    def drop_own(self) -> None:
        self._ask("drop_own")

    def make_kv(self) -> None:
        self._ask("make_kv")

    def drop_kv(self) -> None:
        self._ask("drop_kv")

    def checkpoint_prepare(self) -> None:
        self._ask("checkpoint_prepare")

    def checkpoint_restore(self) -> None:
        self._ask("checkpoint_restore")

    def capture_graphs(self) -> None:
        self._ask("capture_graphs")

    def moved(self, device: str) -> None:
        raise EngineFault("not_available", "a gang's ranks can't change their devices")

    def _ask(self, order: str, *arguments: str) -> list[Said]:
        line = json.dumps([order, *arguments]).encode() + b"\n"
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
        said = []
        for rank in self._ranks:
            assert rank.stdout is not None
            if not (answer := rank.stdout.readline()):
                threading.Event().wait()  # it has died, and this process goes with it
            said.append(msgspec.json.decode(answer, type=Said))
        self._said = said
        for number, one in enumerate(said):
            if one.code:
                raise EngineFault(one.code, f"rank {number} of {len(said)}: {one.message}")
        return said

    def _watch(self) -> None:
        wait(self._pidfds)
        os._exit(70)


def main() -> None:
    tether.die_with(os.getppid())
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("arguments")
    parser.add_argument("devices", nargs="+")
    parser.add_argument("--rank", type=int, required=True)
    o = parser.parse_args()
    part = Part(o.source, json.loads(o.arguments), o.devices[o.rank], rank=o.rank, ranks=len(o.devices))
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        code = message = ""
        found = None
        try:
            found = getattr(part, order)(*arguments) if order != "look" else None
        except EngineFault as fault:
            code, message = fault.code, fault.message
        brought = found if isinstance(found, Brought) else None
        said = Said(
            size=part.size, own_bytes=part.own_bytes, kv_bytes=part.kv_bytes, graphs=part.graphs, attached=part.attached,
            weights=part.weights.hex(), brought=brought, code=code, message=message,
        )  # fmt: skip
        sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
