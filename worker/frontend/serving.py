"""What this frontend serves: one model under one grant, as the worker says."""

import asyncio
from typing import Final

import msgspec

GRANT_WAIT_S: Final = 1.0
"""A request may be routed before the worker has told us of the grant; nothing waits for that, so we do."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    revision: int
    grant: int
    weight_set: str
    source: str
    """Directory with tokenizer, configuration and chat template."""
    context_tokens: int
    engine: str


class NotServing(Exception):
    """The named model and grant are not (or no longer) served here."""


class Admission:
    """The gate: open for one grant, or closed."""

    def __init__(self) -> None:
        self.serving: Serving | None = None
        self._changed = asyncio.Condition()

    async def open(self, serving: Serving) -> None:
        async with self._changed:
            self.serving = serving
            self._changed.notify_all()

    async def shut(self) -> None:
        async with self._changed:
            self.serving = None

    async def enter(self, model: str, grant: int) -> Serving:
        """Return what is served once it is `model` under `grant`.

        Raises:
            NotServing: it is not, after a second.
        """

        def it() -> Serving | None:
            serving = self.serving
            return serving if serving is not None and (serving.model, serving.grant) == (model, grant) else None

        try:
            async with asyncio.timeout(GRANT_WAIT_S), self._changed:
                while (serving := it()) is None:
                    if self.serving is not None and self.serving.grant > grant:
                        break  # that grant is past, it won't come back
                    await self._changed.wait()
                else:
                    return serving
        except TimeoutError:
            pass
        now = f"{self.serving.model!r} under grant {self.serving.grant}" if self.serving is not None else "nothing"
        raise NotServing(f"{model!r} under grant {grant} is not served here; served is {now}")
