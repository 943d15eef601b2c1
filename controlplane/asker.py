"""The NATS client, with requests that can be cancelled at any moment."""

import asyncio
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg


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
