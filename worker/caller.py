"""HTTP calls to frontends: one session for all of a worker's."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import aiohttp


class Unanswered(Exception):
    """No answer within the deadline, or none at all."""


class Caller:
    """`async with` it. Its library is imported by the first call, or by `warm`: that takes as long as all else that a worker
    imports, and a start that finds no instances needs none of it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    def warm(self) -> None:
        """Import what the first call would have to. Blocks for a tenth of a second; may be called in a thread."""
        import aiohttp  # noqa: F401, PLC0415

    async def call(self, method: str, url: str, token: str, data: bytes | None, *, deadline_s: float) -> tuple[int, bytes]:
        """Return the status and the body. Raises Unanswered."""
        import aiohttp  # noqa: PLC0415

        if self._session is None:
            self._session = aiohttp.ClientSession()
        headers = {"Authorization": f"Bearer {token}"}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unanswered(repr(error)) from error
