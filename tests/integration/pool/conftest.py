"""A real daemon, in a process of its own, in a directory of its own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.poolroom import MIB, Daemon, forget, write_safetensors


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ehpool-"))  # short: a socket's path has 107 bytes
    yield made
    if (log := made / "log").exists():
        print(log.read_text()[-8000:])  # seen where a test fails
    forget(made)
    shutil.rmtree(made)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """While it is there, the readers of `slow_daemon` take half a second a chunk."""
    made = tmp_path / "slow"
    made.touch()
    return made


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    yield from _running(Daemon(directory))


@pytest.fixture
def slow_daemon(directory: Path, slow: Path) -> Iterator[Daemon]:
    yield from _running(Daemon(directory, slow=slow))


def _running(daemon: Daemon) -> Iterator[Daemon]:
    daemon.start()
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Path]:
    """Makes a source directory of `size` bytes or so and returns it; the same seed gives the same bytes."""

    def make(name: str = "source", seed: int = 0, size: int = 4 * MIB, tensors: dict[str, np.ndarray] | None = None) -> Path:
        made = tmp_path / name
        made.mkdir(exist_ok=True)
        random = np.random.default_rng(seed)
        write_safetensors(
            made / "model.safetensors",
            tensors or {f"layer.{n}.weight": random.integers(0, 255, size // 4, dtype=np.uint8) for n in range(4)},
        )
        return made

    return make
