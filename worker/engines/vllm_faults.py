"""What goes wrong between vLLM, the pool and the device, as an engine's faults."""

from controlplane.quantities import human_bytes
from worker.engines.interface import EngineFault


def users(of: dict[int, int]) -> str:
    """Who has a device's memory, the largest first, in words."""
    if not of:
        return "the driver does not say who has the memory"
    ordered = sorted(of.items(), key=lambda one: -one[1])
    return "used by " + ", ".join(f"pid {pid} ({human_bytes(size)})" for pid, size in ordered)


class faults:
    """The pool's refusals and a layout that does not fit, as the engine's."""

    def __init__(self, pool_socket: str, device: str) -> None:
        self._pool_socket, self._device = pool_socket, device

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from pool.client import PoolRefused  # noqa: PLC0415
        from pool.native import LayoutDiffers  # noqa: PLC0415

        match error:
            case PoolRefused():
                raise EngineFault(error.code, error.message) from error
            case LayoutDiffers():
                raise EngineFault("layout", str(error)) from error
            case ConnectionError() | TimeoutError() | FileNotFoundError():
                raise EngineFault("pool", f"the pool at {self._pool_socket} does not answer: {error}") from error
            case OSError() | RuntimeError():
                raise EngineFault("no_memory", str(error)) from error
            case _:
                return
