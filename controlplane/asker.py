"""The NATS client, with requests that can be cancelled at any moment and a flush that keeps the order."""

import asyncio
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

POLL_S: Final = 0.001


class Asker(Client):
    """Its own time limit is a `wait_for`, which loses a cancellation that meets an answer (3.11): who was to end goes on."""

    async def request(
        self, subject: str, payload: bytes = b"", timeout: float | None = 0.5,  # noqa: ASYNC109 (as the client has it)
        old_style: bool = False, headers: dict[str, Any] | None = None,
    ) -> Msg:  # fmt: skip
        """As the client's; `timeout` in seconds, None: the caller has a limit. Raises nats.errors.TimeoutError."""
        try:
            async with asyncio.timeout(timeout):
                return await super().request(subject, payload, None, old_style, headers)  # type: ignore[arg-type]
        except TimeoutError as error:
            raise nats.errors.TimeoutError from error

    async def flush(self, timeout: float = 10) -> None:  # noqa: ASYNC109 (as the client has it)
        """Wait until the server has taken all that was sent before, within `timeout` seconds; a connection that is away has
        nothing to take. Raises nats.errors.FlushTimeoutError.

        The client's own PING goes out at once, ahead of the subscriptions and messages that wait for its writer.
        """
        until = asyncio.get_running_loop().time() + timeout
        waiting = self._pending  # its writer sends the whole list and begins another
        try:
            async with asyncio.timeout_at(until):
                while self.is_connected and waiting and self._pending is waiting:  # noqa: ASYNC110 (the client offers no event)
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise nats.errors.FlushTimeoutError from error
        await super().flush(max(POLL_S, until - asyncio.get_running_loop().time()))  # type: ignore[arg-type]
