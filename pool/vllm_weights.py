"""The weights of the vLLM in this process: its own memory at first, the pool's from then on, at the same addresses."""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, unmap_and_release

from pool.blocks import neighbours
from pool.client import PoolRefused
from pool.cuda import access, checked, imported, map_at
from pool.devicelink import DeviceAttachment, attach_device, deposit, exchange
from pool.lent import Mapped
from pool.messages import Attached, Deposit, Filled, Released, Staged
from pool.native import Native, Span, compare, native
from pool.vllm_copyout import copy_out
from pool.vllm_tensors import buffers, named
from pool.vllm_version import memory_pools

_TAG = "weights"


class VllmWeights:
    """One model's. Every method is called by the engine's thread, with no kernel under way that reads weights."""

    def __init__(self, model: torch.nn.Module, draft: torch.nn.Module | None = None, *, device: str | None = None) -> None:
        self.device = device
        """UUID of the GPU that they are on."""
        self._allocator = CuMemAllocator.get_instance()
        self._models = {"": model} if draft is None else {"": model, "draft.": draft}
        """By what stands before the names of their tensors."""
        self._data = [one for one in self._allocator.pointer_to_data.values() if one.tag == _TAG]
        self._native = self._look()
        addresses = {span.address for span in self._native.shared}
        self._shared = [one for one in self._data if one.handle[2] in addresses]
        ordinal = self._data[0].handle[0]
        self._rights = access(ordinal, writable=False)
        self._context = checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())
        self._computed = [(tensor, tensor.cpu()) for tensor in buffers(self._models) if self._is_shared(tensor)]
        """What no checkpoint holds, such as tables of rotations: a load leaves it as it is, so it must be there before."""
        self._own = True
        self._attachment: DeviceAttachment | None = None
        self._neighbours = neighbours([(span.address, span.size) for span in self._native.shared])
        self._mapped = Mapped()
        """The pool's memory. vLLM knows nothing of it: for vLLM its own is asleep."""
        self._loose: str | None = None
        """Whose private tensors lie in this engine's memory."""

    @property
    def layout(self) -> Native:
        return self._native

    @property
    def own(self) -> bool:
        """Whether the weights lie in vLLM's own, writable memory."""
        return self._own

    @property
    def attached(self) -> str | None:
        return self._attachment.attached.weight_set if self._attachment is not None else None

    @property
    def shared_bytes(self) -> int:
        return sum(span.size for span in self._native.shared)

    @property
    def bytes_mapped(self) -> int:
        """Of the pool's memory."""
        return self._mapped.size_bytes

    # ---- own memory -----------------------------------------------------------------------------------------

    def take_own(self) -> None:
        """Writable memory of vLLM's own under the shared segments: nothing in it but what the model computes for itself.

        Raises RuntimeError.
        """
        assert not self._own
        assert self._attachment is None
        for data in self._shared:
            create_and_map(data.handle)
            data.is_asleep = False
        for tensor, kept in self._computed:
            tensor.copy_(kept)
        self._own = True
        self._loose = None  # whoever takes it is about to load something else

    def drop_own(self) -> None:
        """Give it back; the addresses stay."""
        assert self._own
        torch.cuda.synchronize()
        for data in self._shared:
            unmap_and_release(data.handle)
            self._neutralise(data)
        self._own = False

    def deposit(self, pool_socket: str, source: str, form: str) -> Staged:
        """Copy the weights into the pool, onto the memory node of the GPU. Raises PoolRefused, OSError."""
        assert self._own
        torch.cuda.synchronize()
        layout = self._native
        request = Deposit(
            source=source, form=form, segments=layout.segments, host_segments=layout.host_segments, tensors=layout.tensors,
            device=self.device,
        )  # fmt: skip
        staged = deposit(pool_socket, request, lambda fds: copy_out(layout, self._context, fds, request.segments))
        self._loose = staged.weight_set
        return staged

    # ---- the pool's memory ----------------------------------------------------------------------------------

    def attach(
        self, pool_socket: str, weight_set: str, device: str, meanwhile: Callable[[], None], *, beside: tuple[str, ...] = ()
    ) -> Filled:
        """Map a set, read-only; `meanwhile` runs while its bytes travel. Raises LayoutDiffers, PoolRefused, OSError."""
        assert not self._own
        assert self._attachment is None

        def map_them(attached: Attached, fds: list[int]) -> None:
            compare(self._native, attached)
            spans = [self._native.span_of(group) for group in attached.covered]
            for span, fd in zip(spans, fds, strict=False):
                handle = imported(fd)
                try:
                    map_at(span.address, span.size, handle, self._rights)
                except OSError:
                    driver.cuMemRelease(handle)
                    raise
                self._mapped.add(span.address, span.size, handle)
            meanwhile()

        try:
            self._attachment = attach_device(
                pool_socket, weight_set, device, map_them, beside=beside, neighbours=self._neighbours
            )
            self._copy_private(self._attachment)
        except BaseException:
            self._mapped.clear()
            if self._attachment is not None:
                self._attachment.close()
                self._attachment = None
            raise
        self._attachment.close_fds()
        filled = self._attachment.filled
        assert filled is not None
        return filled

    def exchange(self, weight_set: str) -> Filled | None:
        """Another set of the same layout into the memory that is mapped; None: it can't be, and nothing has changed.

        Raises OSError, RuntimeError: nothing is mapped.
        """
        assert self._attachment is not None
        torch.cuda.synchronize()
        try:
            self._attachment = exchange(self._attachment, weight_set)
            self._copy_private(self._attachment)
        except PoolRefused:  # whatever it is: a detach and an attach tell
            return None
        except (
            BaseException
        ):  # also for want of memory on the way to private tensors: one model's beside another's must not stay
            self._mapped.clear()
            self._attachment.close()
            self._attachment = None
            raise
        self._attachment.close_fds()
        return self._attachment.filled

    def detach(self) -> Released | None:
        """Unmap, give the reference back, hear that the memory is free (None: the daemon has died). Twice is fine."""
        if self._attachment is None:
            return None
        torch.cuda.synchronize()
        self._mapped.clear()
        attachment, self._attachment = self._attachment, None
        return attachment.release()

    def _copy_private(self, attachment: DeviceAttachment) -> None:
        """Tensors that share a segment with scratch lie in memory of our own: bring them there, unless they are there."""
        attached = attachment.attached
        if self._loose == attached.weight_set or not attached.host_segments:
            return
        self._loose = None
        fd, size = attachment.fds[-1], attached.segments[-1]
        with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as host:
            whole = torch.from_numpy(np.frombuffer(host, np.uint8).copy()).cuda()
        for tensor in attached.tensors:
            if (at := self._native.private.get(tensor.name)) is not None:
                start = whole.data_ptr() + tensor.offset
                checked("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(at.address, start, at.size, 0))
        torch.cuda.synchronize()
        self._loose = attached.weight_set

    def _neutralise(self, data: Any) -> None:
        """vLLM would release at exit what is not its own any more."""
        data.is_asleep = True
        _remember(data, 0)

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        return any(span.address <= tensor.data_ptr() < span.end for span in self._native.shared)

    # ---- looking and copying out ----------------------------------------------------------------------------

    def _look(self) -> Native:
        segments = [Span(one.handle[2], one.handle[1]) for one in self._data]
        blocks = [
            Span(block["address"], block["requested_size"])
            for pool in memory_pools(self._allocator, _TAG)
            for segment in pool.snapshot()
            for block in segment["blocks"]
            if block["state"].startswith("active")
        ]
        return native(segments, blocks, list(named(self._models)))


def _remember(data: Any, handle: int) -> None:
    """vLLM keeps each handle in memory of its C side and releases what it finds there: let it find what is mapped."""
    ctypes.c_uint64.from_address(data.handle[3]).value = handle
