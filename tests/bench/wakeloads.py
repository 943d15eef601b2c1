"""What goes on beside wakes: sets that are brought and dropped, decoding that is bound by a device's memory."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pool.devicelink import attach_device, deposit
from pool.filling import Filling
from pool.messages import Deposit, Tensor
from tests.poolroom import write_safetensors

MIB = 1 << 20
WRITERS = 8


def request(path: Path, name: str, wanted: list[int]) -> Deposit:
    source = path / name
    source.mkdir(exist_ok=True)
    write_safetensors(source / "model.safetensors", {"x": np.arange(64, dtype=np.float32)})
    tensors = tuple(
        Tensor(name=f"t{number}", dtype="U8", shape=(size,), segment=number, offset=0, size_bytes=size)
        for number, size in enumerate(wanted)
    )
    return Deposit(source=str(source), form=name, segments=tuple(wanted), host_segments=0, tensors=tensors)


def bring(socket: Path, order: Deposit, seed: int) -> tuple[str, dict[str, float]]:
    """Deposit random bytes; the set, and seconds for room, for writing, for digests."""
    page = np.random.default_rng(seed).integers(0, 255, 64 * MIB, np.uint8)
    points = [time.monotonic()]

    def write(fds: list[int]) -> Iterator[int]:
        points.append(time.monotonic())

        def one(number: int) -> None:
            size = order.segments[number]
            for at in range(0, size, len(page)):
                segments.write(number, at, page[: min(len(page), size - at)].data)
            segments.write(number, 0, memoryview(bytearray(number.to_bytes(8, "little"))))

        with Filling(fds, order.segments) as segments, ThreadPoolExecutor(WRITERS) as threads:
            for number, _ in enumerate(threads.map(one, range(len(fds)))):
                yield number + 1
        points.append(time.monotonic())

    staged = deposit(socket, order, write)
    points.append(time.monotonic())
    names = ("room_s", "write_s", "digest_s")
    return staged.weight_set, {name: points[n + 1] - points[n] for n, name in enumerate(names)}


def stage_for_ever(socket: str, path: str, wanted: list[int], told: str) -> None:
    """Another set, brought and dropped again and again."""
    import asyncio

    from pool.client import PoolClient

    async def drop(weight_set: str) -> None:
        async with await PoolClient.connect(socket) as client:
            await client.drop(weight_set, deadline_s=60)

    order, seed = request(Path(path), "other", wanted), 100
    while True:
        weight_set, seconds = bring(Path(socket), order, seed)
        with Path(told).open("a") as file:
            file.write(json.dumps(seconds) + "\n")
        asyncio.run(drop(weight_set))
        seed += 1


def decode_for_ever(uuid: str, told: str, socket: str = "", weight_set: str = "") -> None:
    """What decoding asks of a GPU: every weight read once a token, kernels in one graph.

    weight_set: what this process has there from the pool, as an engine that is up has its weights.
    """
    held = attach_device(Path(socket), weight_set, uuid, lambda attached, fds: None) if weight_set else None  # noqa: F841
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    import torch

    weights = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    x = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        for weight in weights:
            y = x @ weight
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            y = torch.nn.functional.normalize(x @ weight)  # noqa: F841
    count = 0
    with Path(told).open("a", buffering=1) as file:
        while True:
            for _ in range(10):
                graph.replay()
                torch.cuda.synchronize()
            count += 10
            file.write(f"{time.monotonic()} {count}\n")


def rate_between(told: Path, begun: float, ended: float) -> float:
    """Tokens a second, by the words that lie in between."""
    words = [(float(at), int(count)) for at, count in (line.split() for line in told.read_text().splitlines()[:-1])]
    inside = [word for word in words if begun <= word[0] <= ended]
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


@contextmanager
def beside(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(20)
