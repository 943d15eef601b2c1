"""The daemon's memory of a device, mapped in an engine."""

from typing import Any

from cuda.bindings import driver

from pool.cuda import CudaError, checked


class Mapped:
    """Imported memory at reserved addresses. It goes by two calls, and what of them has been done is not done again."""

    def __init__(self) -> None:
        self._there: list[tuple[int, int, Any]] = []
        """Address, size, handle."""
        self._loose: list[Any] = []
        """Handles of what is mapped no more and could not be released yet."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self._there)

    def add(self, address: int, size: int, handle: Any) -> None:
        """`map_at` has mapped it."""
        self._there.append((address, size, handle))

    def clear(self) -> None:
        """Raises CudaError for the first that did not go; the others went, and the next `clear` tries those again."""
        failures: list[CudaError] = []
        there, self._there, loose, self._loose = self._there, [], self._loose, []
        for handle in loose:
            self._release(handle, failures)
        for address, size, handle in there:
            try:
                checked("cuMemUnmap", driver.cuMemUnmap(address, size))
            except CudaError as error:
                self._there.append((address, size, handle))
                failures.append(error)
            else:
                self._release(handle, failures)
        if failures:
            raise failures[0]

    def _release(self, handle: Any, failures: list[CudaError]) -> None:
        try:
            checked("cuMemRelease", driver.cuMemRelease(handle))
        except CudaError as error:
            self._loose.append(handle)
            failures.append(error)
