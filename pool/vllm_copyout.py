"""Weights from the device into a deposit's segments: through pinned buffers, several at once."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from cuda.bindings import driver

from pool.cuda import checked
from pool.filling import Filling
from pool.messages import Tensor
from pool.native import Native

_CHUNK_BYTES = 16 << 20
"""From the device through a pinned buffer of this size: from 8 MiB on the link is full."""
_WORD_BYTES = 256 << 20
"""Between two words on what is written: a few milliseconds."""
_WRITERS = 8
"""Writing into fresh shared memory is what takes the time; measured alike with 8 and 16 threads."""


def copy_out(layout: Native, context: Any, fds: list[int], sizes: Sequence[int]) -> Iterator[int]:
    """Every tensor to its place in the set's segments (`sizes`: bytes of each); now and then, how many are there."""
    pieces = [
        (tensor, at, min(_CHUNK_BYTES, tensor.size_bytes - at))
        for tensor in layout.tensors
        for at in range(0, tensor.size_bytes, _CHUNK_BYTES)
    ]
    local = threading.local()
    streams: list[Any] = []

    def write(piece: tuple[Tensor, int, int]) -> None:
        tensor, at, size = piece
        if not hasattr(local, "buffer"):
            checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
            local.buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            local.stream = checked("cuStreamCreate", driver.cuStreamCreate(1))
            streams.append(local.stream)
        start = _address(layout, tensor) + at
        call = driver.cuMemcpyDtoHAsync(local.buffer.data_ptr(), start, size, local.stream)
        checked("cuMemcpyDtoHAsync", call)
        checked("cuStreamSynchronize", driver.cuStreamSynchronize(local.stream))
        segments.write(tensor.segment, tensor.offset + at, memoryview(local.buffer.numpy())[:size])

    try:
        with Filling(fds, sizes) as segments, ThreadPoolExecutor(_WRITERS, "pool-deposit") as threads:
            told = written = done = 0
            for (tensor, at, size), _ in zip(pieces, threads.map(write, pieces), strict=True):
                written += size
                done += at + size == tensor.size_bytes
                if written - told >= _WORD_BYTES:
                    told = written
                    yield done
    finally:
        for stream in streams:
            driver.cuStreamDestroy(stream)


def _address(layout: Native, tensor: Tensor) -> int:
    private = layout.private.get(tensor.name)
    return private.address if private is not None else layout.shared[tensor.segment].address + tensor.offset
