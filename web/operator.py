"""Operators' commands on their way to the decider: who says it, and an id that makes saying it twice harmless."""

import hashlib
from typing import Final

import msgspec

from controlplane import ids
from controlplane.answer import Answer
from controlplane.bus import Bus
from controlplane.commands import AnyCommand, Order
from controlplane.subjects import COMMAND_OPERATOR
from web.errors import ApiError

KEY_LIMIT: Final = 255


class Operator:
    """Sends commands for whoever was authenticated."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def command(self, body: AnyCommand, actor: str, *, key: str | None = None) -> Answer:
        """Return the decider's answer. Raises Refused.

        With `key` (an `Idempotency-Key`), the same actor's same key and body always name the same command: the first answer
        comes again, also from another web process. A key used again for something else names another command.
        """
        command = ids.new(ids.COMMAND) if key is None else _derived(actor, key, body)
        return await self._bus.command(COMMAND_OPERATOR, Order(id=command, actor=actor, body=body))


def _derived(actor: str, key: str, body: AnyCommand) -> str:
    if not 0 < len(key) <= KEY_LIMIT or not key.isprintable():
        message = f"'Idempotency-Key' must have 1 to {KEY_LIMIT} printable characters"
        raise ApiError(400, "invalid", message, param="Idempotency-Key")
    named = msgspec.json.encode((actor, key, body), order="deterministic")
    return f"{ids.COMMAND}_{hashlib.sha256(named).hexdigest()[:40]}"
