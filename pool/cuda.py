"""`Gpu` over the CUDA driver. Imported only where there is a device: cuda-python is no requirement of nodes without one."""

import contextlib
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from pool import nvml
from pool.gpu import Activity, Block, NoDeviceMemory
from pool.topology import Topology, read_topology

_PINNED = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_WRITABLE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_READ_ONLY = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
_MINIMUM = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process."""
_NON_BLOCKING = 1
_NO_TIMING = 2
_ACCESS = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED


class CudaError(OSError):
    """The driver's no; `code` is its number."""

    def __init__(self, call: str, result: Any) -> None:
        super().__init__(int(result), f"{call}: {getattr(result, 'name', result)}")
        self.code = int(result)


def checked(call: str, answer: Any) -> Any:
    """The value behind a driver call's status. Raises CudaError."""
    if int(answer[0]):
        raise CudaError(call, answer[0])
    return answer[1] if len(answer) == 2 else answer[1:]


def _all_checked(*calls: tuple[str, Any]) -> None:
    """Of calls that have all been made, whatever became of the first. Raises CudaError for the first that failed."""
    for call, answer in calls:
        checked(call, answer)


def access(ordinal: int, *, writable: bool) -> Any:
    """Who may touch a mapping, and how."""
    of = driver.CUmemAccessDesc()
    of.location.type = _ON_DEVICE
    of.location.id = ordinal
    of.flags = _WRITABLE if writable else _READ_ONLY
    return of


def imported(descriptor: int) -> Any:
    """The memory behind a descriptor, to be released. The descriptor may be closed afterwards."""
    return checked("cuMemImportFromShareableHandle", driver.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR))


def map_at(address: int, size: int, handle: Any, *rights: Any) -> None:
    """Map memory over reserved addresses. Leaves nothing mapped when it raises."""
    checked("cuMemMap", driver.cuMemMap(address, size, 0, handle, 0))
    try:
        checked("cuMemSetAccess", driver.cuMemSetAccess(address, size, list(rights), len(rights)))
    except CudaError:
        driver.cuMemUnmap(address, size)
        raise


def stacks(size_bytes: int) -> int:
    """Have the current context's stacks at `size_bytes` a thread of the GPU, and return what they were at. Raises CudaError.

    Device memory for all threads that could run at once; nothing may run.
    """
    limit = driver.CUlimit.CU_LIMIT_STACK_SIZE
    before = int(checked("cuCtxGetLimit", driver.cuCtxGetLimit(limit)))
    checked("cuCtxSetLimit", driver.cuCtxSetLimit(limit, size_bytes))
    return before


def uuid_text(raw: bytes) -> str:
    """As NVML writes it."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class CudaGpu:
    """One device, by its ordinal among those that this process sees."""

    def __init__(self, ordinal: int) -> None:
        checked("cuInit", driver.cuInit(0))
        self._device = checked("cuDeviceGet", driver.cuDeviceGet(ordinal))
        self._context = checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(self._device))
        self.bind()
        self.uuid = uuid_text(bytes(checked("cuDeviceGetUuid", driver.cuDeviceGetUuid(self._device)).bytes))
        told = checked("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId(32, self._device))
        self.bus_id = bytes(told).split(b"\0")[0].decode()
        self.total_bytes = int(checked("cuMemGetInfo", driver.cuMemGetInfo())[1])
        self._stream = _stream()
        self._rights = {self.uuid: access(ordinal, writable=True)}
        self.kind = driver.CUmemAllocationProp()
        self.kind.type = _PINNED
        self.kind.location.type = _ON_DEVICE
        self.kind.location.id = ordinal
        self.kind.requestedHandleTypes = _DESCRIPTOR
        self.granularity = int(
            checked("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(self.kind, _MINIMUM))
        )

    def bind(self) -> None:
        checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(self._context))

    def free_bytes(self) -> int:
        return int(checked("cuMemGetInfo", driver.cuMemGetInfo())[0])

    def users(self) -> dict[int, int]:
        return nvml.users(self.uuid)

    def activity(self) -> Activity | None:
        return nvml.activity(self.uuid)

    def reaches(self, other: "CudaGpu") -> bool:
        """Whether this device may write the other's memory directly, without the host between."""
        asked = driver.cuDeviceGetP2PAttribute(_ACCESS, self._device, other._device)
        return bool(checked("cuDeviceGetP2PAttribute", asked)) and nvml.joined(self.uuid, other.uuid)

    def let_write(self, other: "CudaGpu") -> None:
        """Blocks that are made with this writer's name can be written by it."""
        self._rights[other.uuid] = other._rights[other.uuid]

    def create(self, size: int, writers: Sequence[str] = ()) -> Block:
        handle = _allocated("cuMemCreate", driver.cuMemCreate(size, self.kind, 0))
        try:
            address = checked("cuMemAddressReserve", driver.cuMemAddressReserve(size, self.granularity, 0, 0))
            try:
                map_at(int(address), size, handle, *[self._rights[uuid] for uuid in (self.uuid, *writers)])
            except CudaError:
                driver.cuMemAddressFree(address, size)
                raise
        except CudaError:
            driver.cuMemRelease(handle)
            raise
        return Block(int(address), size, int(handle))

    def export(self, block: Block) -> int:
        handle = driver.CUmemGenericAllocationHandle(block.handle)
        return int(checked("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle(handle, _DESCRIPTOR, 0)))

    def destroy(self, block: Block) -> None:
        _all_checked(
            ("cuMemUnmap", driver.cuMemUnmap(block.address, block.size)),
            ("cuMemAddressFree", driver.cuMemAddressFree(block.address, block.size)),
            ("cuMemRelease", driver.cuMemRelease(driver.CUmemGenericAllocationHandle(block.handle))),
        )

    def register(self, address: int, size: int) -> None:
        checked("cuMemHostRegister", driver.cuMemHostRegister(address, size, _PORTABLE))

    def unregister(self, address: int) -> None:
        checked("cuMemHostUnregister", driver.cuMemHostUnregister(address))

    def copy(self, block: Block, offset: int, address: int, size: int) -> None:
        checked("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync(block.address + offset, address, size, self._stream))

    def wait(self) -> None:
        checked("cuStreamSynchronize", driver.cuStreamSynchronize(self._stream))

    def relay(self, buffers: int, size: int) -> "CudaRelay":
        self.bind()
        return CudaRelay(buffers, size)


class CudaRelay:
    """Two streams of one device: into the ring, and on to another device. Events keep each buffer for one at a time."""

    def __init__(self, buffers: int, size: int) -> None:
        self._memory = int(_allocated("cuMemAlloc", driver.cuMemAlloc(buffers * size)))
        self._size, self._sent = size, 0
        self._streams: list[Any] = []
        self._landed: list[Any] = []
        self._gone: list[Any] = []
        try:
            for _ in range(2):
                self._streams.append(_stream())
            for _ in range(buffers):
                self._landed.append(_event())
                self._gone.append(_event())
        except (CudaError, NoDeviceMemory):
            with contextlib.suppress(CudaError):  # why it can't be is what is told
                self.close()
            raise
        self._in, self._out = self._streams

    def send(self, block: Block, offset: int, address: int, size: int) -> None:
        number = self._sent % len(self._gone)
        buffer = self._memory + number * self._size
        if self._sent >= len(self._gone):  # waited for here, not on the device: no more is on its way than the ring holds
            checked("cuEventSynchronize", driver.cuEventSynchronize(self._gone[number]))
        checked("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync(buffer, address, size, self._in))
        checked("cuEventRecord", driver.cuEventRecord(self._landed[number], self._in))
        checked("cuStreamWaitEvent", driver.cuStreamWaitEvent(self._out, self._landed[number], 0))
        checked("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(block.address + offset, buffer, size, self._out))
        checked("cuEventRecord", driver.cuEventRecord(self._gone[number], self._out))
        self._sent += 1

    def wait(self) -> None:
        _all_checked(*[("cuStreamSynchronize", driver.cuStreamSynchronize(stream)) for stream in self._streams])

    def close(self) -> None:
        _all_checked(
            *[("cuEventDestroy", driver.cuEventDestroy(event)) for event in (*self._landed, *self._gone)],
            *[("cuStreamDestroy", driver.cuStreamDestroy(stream)) for stream in self._streams],
            ("cuMemFree", driver.cuMemFree(self._memory)),
        )


def _stream() -> Any:
    return _allocated("cuStreamCreate", driver.cuStreamCreate(_NON_BLOCKING))


def _event() -> Any:
    return _allocated("cuEventCreate", driver.cuEventCreate(_NO_TIMING))


def _allocated(call: str, answer: Any) -> Any:
    """Raises NoDeviceMemory, CudaError."""
    try:
        return checked(call, answer)
    except CudaError as error:
        if error.code == int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise NoDeviceMemory(str(error)) from error
        raise


def devices() -> tuple[list[CudaGpu], Topology]:
    """All that this process sees. Raises CudaError where there is no driver or no device."""
    checked("cuInit", driver.cuInit(0))
    found = [CudaGpu(ordinal) for ordinal in range(int(checked("cuDeviceGetCount", driver.cuDeviceGetCount())))]
    peers = [(one.uuid, other.uuid) for one in found for other in found if one is not other and one.reaches(other)]
    for one in found:
        for other in found:
            if (other.uuid, one.uuid) in peers:
                one.let_write(other)
    links = {gpu.uuid: link for gpu in found if (link := nvml.link(gpu.uuid)) is not None}
    return found, read_topology({gpu.uuid: gpu.bus_id for gpu in found}, peers, links)
