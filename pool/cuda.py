"""`Gpu` over the CUDA driver. Imported only where there is a device: cuda-python is no requirement of nodes without one."""

from typing import Any

from cuda.bindings import driver

from pool.gpu import Block, NoDeviceMemory

_PINNED = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_WRITABLE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_READ_ONLY = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
_MINIMUM = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process."""
_NON_BLOCKING = 1


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


def map_at(address: int, size: int, handle: Any, rights: Any) -> None:
    """Map memory over reserved addresses. Leaves nothing mapped when it raises."""
    checked("cuMemMap", driver.cuMemMap(address, size, 0, handle, 0))
    try:
        checked("cuMemSetAccess", driver.cuMemSetAccess(address, size, [rights], 1))
    except CudaError:
        driver.cuMemUnmap(address, size)
        raise


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
        self.total_bytes = int(checked("cuMemGetInfo", driver.cuMemGetInfo())[1])
        self._stream = checked("cuStreamCreate", driver.cuStreamCreate(_NON_BLOCKING))
        self._rights = access(ordinal, writable=True)
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = _PINNED
        self._kind.location.type = _ON_DEVICE
        self._kind.location.id = ordinal
        self._kind.requestedHandleTypes = _DESCRIPTOR
        self.granularity = int(
            checked("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(self._kind, _MINIMUM))
        )

    def bind(self) -> None:
        checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(self._context))

    def free_bytes(self) -> int:
        return int(checked("cuMemGetInfo", driver.cuMemGetInfo())[0])

    def create(self, size: int) -> Block:
        try:
            handle = checked("cuMemCreate", driver.cuMemCreate(size, self._kind, 0))
        except CudaError as error:
            if error.code == int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
                raise NoDeviceMemory(str(error)) from error
            raise
        try:
            address = checked("cuMemAddressReserve", driver.cuMemAddressReserve(size, self.granularity, 0, 0))
            try:
                map_at(int(address), size, handle, self._rights)
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
        checked("cuMemUnmap", driver.cuMemUnmap(block.address, block.size))
        checked("cuMemAddressFree", driver.cuMemAddressFree(block.address, block.size))
        checked("cuMemRelease", driver.cuMemRelease(driver.CUmemGenericAllocationHandle(block.handle)))

    def register(self, address: int, size: int) -> None:
        checked("cuMemHostRegister", driver.cuMemHostRegister(address, size, _PORTABLE))

    def unregister(self, address: int) -> None:
        checked("cuMemHostUnregister", driver.cuMemHostUnregister(address))

    def copy(self, block: Block, address: int) -> None:
        checked("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync(block.address, address, block.size, self._stream))

    def wait(self) -> None:
        checked("cuStreamSynchronize", driver.cuStreamSynchronize(self._stream))


def devices() -> list[CudaGpu]:
    """All that this process sees. Raises CudaError where there is no driver or no device."""
    checked("cuInit", driver.cuInit(0))
    return [CudaGpu(ordinal) for ordinal in range(int(checked("cuDeviceGetCount", driver.cuDeviceGetCount())))]
