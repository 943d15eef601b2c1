"""Nodes asked directly, past the log: what only they can see, such as the bytes of an image on their disk."""

from typing import Final

import msgspec
import nats.errors

from controlplane.bus import Bus
from controlplane.refusal import Code, Refused
from controlplane.subjects import ImageAsk, ImageDone, images_of

NODE_S: Final = 55.0
"""A check reads a whole image, some GiB at most; below the 60 s after which browsers' requests are given up."""


class Nodes:
    """Asks nodes over the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ask(self, node: str, ask: ImageAsk) -> ImageDone:
        """The node's answer; its `code` is set when the image is not as it should be. Raises Refused (unavailable)."""
        try:
            reply = await self._bus.nc.request(images_of(node), msgspec.json.encode(ask), timeout=NODE_S)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            message = f"node {node} does not answer: {error or type(error).__name__}"
            raise Refused(Code.UNAVAILABLE, message, retry_after_ms=1000) from error
        return msgspec.json.decode(reply.data, type=ImageDone)
