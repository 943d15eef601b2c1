"""A CUDA driver made of host memory, in the place of cuda-python: what the pool asks of the real one, with its order of things.

Device memory is memory files, mapped where the caller reserves addresses; every stream is a thread that does one thing after
the other; copies stand still at a number of bytes while a file says so (`FAKE_CUDA_HOLD`). A copy to where its device has no
access is refused, as there.
`FAKE_CUDA_DEVICES`, `FAKE_CUDA_BYTES` (of each), `FAKE_CUDA_NO_PEERS`. Each process sees devices of its own.
"""

import ctypes
import enum
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COUNT = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
_BYTES = int(os.environ.get("FAKE_CUDA_BYTES", str(256 << 20)))
_HOLD = os.environ.get("FAKE_CUDA_HOLD")
"""A file with a number: while it is there, a copy that would begin when so many bytes have been copied waits."""
_PEERS = "FAKE_CUDA_NO_PEERS" not in os.environ
_limits: dict[int, int] = {0: 1024}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUlimit(enum.IntEnum):
    CU_LIMIT_STACK_SIZE = 0


class CUevent_flags(enum.IntEnum):
    CU_EVENT_DISABLE_TIMING = 2


class CUdevice_P2PAttribute(enum.IntEnum):
    CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2


class CUmemLocation:
    type: int = 0
    id: int = 0


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.location = CUmemLocation()
        self.flags = 0


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type = 0
        self.location = CUmemLocation()
        self.requestedHandleTypes = 0


class CUmemGenericAllocationHandle(int):
    pass


class CUdeviceptr(int):
    pass


class CUuuid:
    def __init__(self, raw: bytes) -> None:
        self.bytes = raw


class Stream:
    """One thing after the other, in a thread of its own."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self.jobs.get()()

    def wait(self) -> None:
        done = threading.Event()
        self.jobs.put(done.set)
        done.wait()


class Event:
    def __init__(self) -> None:
        self.last = threading.Event()
        self.last.set()


class _State(threading.local):
    device = 0


_state = _State()
_lock = threading.Lock()
_memory: dict[int, tuple[int, int]] = {}
"""Handle (a descriptor) -> size, device."""
_taken: dict[int, int] = {}
"""Address of ordinary device memory -> handle."""
_mapped: dict[int, tuple[int, int, set[int]]] = {}
"""Address -> size, handle, devices that may write there."""
_pinned: dict[int, int] = {}
_copied: list[int] = []

Answer = tuple[Any, ...]
_OK = CUresult.CUDA_SUCCESS
_BAD = CUresult.CUDA_ERROR_INVALID_VALUE


def cuInit(flags: int) -> Answer:
    return (_OK,)


def cuDeviceGetCount() -> Answer:
    return _OK, _COUNT


def cuDeviceGet(ordinal: int) -> Answer:
    return _OK, ordinal


def cuDeviceGetUuid(device: int) -> Answer:
    return _OK, CUuuid(bytes([device]) * 16)


def cuDeviceGetPCIBusId(length: int, device: int) -> Answer:
    return _OK, f"0000:{device + 1:02x}:00.0".encode()


def cuDevicePrimaryCtxRetain(device: int) -> Answer:
    return _OK, device


def cuCtxSetCurrent(context: int) -> Answer:
    _state.device = context
    return (_OK,)


def cuCtxGetLimit(limit: int) -> Answer:
    return _OK, _limits[limit]


def cuCtxSetLimit(limit: int, value: int) -> Answer:
    _limits[limit] = value
    return (_OK,)


def cuDeviceGetP2PAttribute(attribute: int, source: int, target: int) -> Answer:
    return _OK, int(_PEERS and source != target)


def cuMemGetInfo() -> Answer:
    used = sum(size for size, device in list(_memory.values()) if device == _state.device)
    return _OK, _BYTES - used, _BYTES


def cuMemGetAllocationGranularity(kind: CUmemAllocationProp, option: int) -> Answer:
    return _OK, 2 << 20


def cuStreamCreate(flags: int) -> Answer:
    return _OK, Stream()


def cuStreamDestroy(stream: Stream) -> Answer:
    return (_OK,)


def cuStreamSynchronize(stream: Stream) -> Answer:
    stream.wait()
    return (_OK,)


def cuEventCreate(flags: int) -> Answer:
    return _OK, Event()


def cuEventDestroy(event: Event) -> Answer:
    return (_OK,)


def cuEventRecord(event: Event, stream: Stream) -> Answer:
    event.last = threading.Event()
    stream.jobs.put(event.last.set)
    return (_OK,)


def cuEventSynchronize(event: Event) -> Answer:
    event.last.wait()
    return (_OK,)


def cuStreamWaitEvent(stream: Stream, event: Event, flags: int) -> Answer:
    last = event.last
    stream.jobs.put(lambda: (last.wait(), None)[1])
    return (_OK,)


def cuMemCreate(size: int, kind: CUmemAllocationProp, flags: int) -> Answer:
    with _lock:
        used = sum(each for each, device in _memory.values() if device == kind.location.id)
        if used + size > _BYTES:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        fd = os.memfd_create("device-memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        _memory[fd] = (size, kind.location.id)
    return _OK, CUmemGenericAllocationHandle(fd)


def cuMemRelease(handle: int) -> Answer:
    with _lock:
        if _memory.pop(int(handle), None) is None:
            return (_BAD,)
        os.close(int(handle))
    return (_OK,)


def cuMemExportToShareableHandle(handle: int, kind: int, flags: int) -> Answer:
    return _OK, os.dup(int(handle))


def cuMemImportFromShareableHandle(descriptor: int, kind: int) -> Answer:
    fd = os.dup(descriptor)
    _memory[fd] = (os.fstat(fd).st_size, -1)
    return _OK, CUmemGenericAllocationHandle(fd)


def cuMemAddressReserve(size: int, alignment: int, address: int, flags: int) -> Answer:
    return _OK, CUdeviceptr(_libc.mmap(None, size, 0, 0x22, -1, 0))


def cuMemAddressFree(address: int, size: int) -> Answer:
    return (_BAD,) if _libc.munmap(int(address), size) else (_OK,)


def cuMemMap(address: int, size: int, offset: int, handle: int, flags: int) -> Answer:
    if _libc.mmap(int(address), size, 3, 0x11, int(handle), offset) != int(address):
        return (_BAD,)
    _mapped[int(address)] = (size, int(handle), set())
    return (_OK,)


def cuMemSetAccess(address: int, size: int, rights: list[CUmemAccessDesc], count: int) -> Answer:
    assert len(rights) == count
    for at, (each, _, writers) in _mapped.items():
        if int(address) <= at and at + each <= int(address) + size:
            writers |= {
                one.location.id for one in rights if int(one.flags) == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            }
    return (_OK,)


def cuMemUnmap(address: int, size: int) -> Answer:
    if _mapped.pop(int(address), None) is None:
        return (_BAD,)
    _libc.mmap(int(address), size, 0, 0x32, -1, 0)
    return (_OK,)


def cuMemAlloc(size: int) -> Answer:
    kind = CUmemAllocationProp()
    kind.location.id = _state.device
    status, handle = cuMemCreate(size, kind, 0)
    if status:
        return status, None
    _, address = cuMemAddressReserve(size, 0, 0, 0)
    cuMemMap(address, size, 0, handle, 0)
    _mapped[address][2].add(_state.device)
    _taken[address] = handle
    return _OK, address


def cuMemFree(address: int) -> Answer:
    handle = _taken.pop(int(address))
    size = _mapped[int(address)][0]
    cuMemUnmap(address, size)
    cuMemAddressFree(address, size)
    return cuMemRelease(handle)


def cuMemHostRegister(address: int, size: int, flags: int) -> Answer:
    if any(at < address + size and address < at + each for at, each in _pinned.items()):
        return (_BAD,)
    _pinned[address] = size
    return (_OK,)


def cuMemHostUnregister(address: int) -> Answer:
    return (_BAD,) if _pinned.pop(address, None) is None else (_OK,)


def _held() -> bool:
    try:
        return _HOLD is not None and sum(_copied) >= int(Path(_HOLD).read_text())
    except FileNotFoundError:
        return False


def _copy(to: int, source: int, size: int, stream: Stream) -> Answer:
    if not _writable(int(to), size):
        return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)

    def work() -> None:
        while _held():
            time.sleep(0.005)
        ctypes.memmove(int(to), int(source), size)
        _copied.append(size)

    stream.jobs.put(work)
    return (_OK,)


def _writable(to: int, size: int) -> bool:
    return any(
        at <= to and to + size <= at + each and _state.device in writers for at, (each, _, writers) in list(_mapped.items())
    )


def cuMemcpyHtoDAsync(to: int, source: int, size: int, stream: Stream) -> Answer:
    """Within one pinned range, or from memory that is not pinned at all."""
    inside = any(at <= source and source + size <= at + each for at, each in _pinned.items())
    touches = any(at < source + size and source < at + each for at, each in _pinned.items())
    if touches and not inside:
        return (_BAD,)
    return _copy(to, source, size, stream)


def cuMemcpyDtoDAsync(to: int, source: int, size: int, stream: Stream) -> Answer:
    return _copy(to, source, size, stream)


def cuMemcpyDtoH(to: int, source: int, size: int) -> Answer:
    ctypes.memmove(to, int(source), size)
    return (_OK,)


def cuMemsetD8(to: int, value: int, size: int) -> Answer:
    if not _writable(int(to), size):
        return (_BAD,)
    ctypes.memset(int(to), value, size)
    return (_OK,)
