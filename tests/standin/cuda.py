"""The pool's device on a pretended machine: blocks are memory files, and the machine's account of the device is kept."""

import os
from collections.abc import Sequence

from pool.gpu import Block, NoDeviceMemory
from pool.topology import NO_TOPOLOGY, Topology
from tests.fakegpu import MIB, FakeGpu
from tests.standin.install import place
from tests.standin.room import DeviceFull, Room, Taker

CONTEXT_BYTES = 2 * MIB
"""A daemon has taken so much of a device before it holds anything there."""


class AccountedGpu(FakeGpu):
    def __init__(self, room: Room, uuid: str) -> None:
        super().__init__(total_bytes=room.devices[uuid], uuid=uuid)
        self._room, self._taker = room, Taker(room, uuid)
        self._taker.take(CONTEXT_BYTES)

    def free_bytes(self) -> int:
        return self._room.free(self.uuid)

    def users(self) -> dict[int, int]:
        return self._room.processes(self.uuid)

    def create(self, size: int, writers: Sequence[str] = ()) -> Block:
        try:
            self._taker.take(size)
        except DeviceFull as error:
            raise NoDeviceMemory(str(error)) from error
        fd = os.memfd_create("block", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self.made(fd, size, writers)

    def destroy(self, block: Block) -> None:
        super().destroy(block)
        self._taker.give(block.size)


def devices() -> tuple[list[AccountedGpu], Topology]:
    room = Room(place())
    shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return [AccountedGpu(room, uuid) for uuid in room.devices if uuid in shown], NO_TOPOLOGY
