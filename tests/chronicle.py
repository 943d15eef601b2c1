"""Making recorded events for tests: positions, versions and ordinals as a decision would give them."""

from controlplane import ids
from controlplane.envelope import Recorded
from controlplane.events import AnyEvent

NOW_MS = 1_800_000_000_000


class Chronicle:
    """Numbers events as they would follow each other from position `after`."""

    def __init__(self, after: int = 0, at_ms: int = NOW_MS) -> None:
        self.position = after
        self.at_ms = at_ms
        self._versions: dict[str, int] = {}

    def record(
        self, *events: AnyEvent, command: str | None = None, actor: str = "desk", operation: str | None = None
    ) -> list[Recorded]:
        """Events of one command, each a millisecond after the one before."""
        command = command or ids.new(ids.COMMAND)
        made = []
        for ordinal, event in enumerate(events):
            self.position += 1
            self.at_ms += 1
            version = self._versions[event.stream] = self._versions.get(event.stream, 0) + 1
            made.append(
                Recorded(
                    position=self.position,
                    stream=event.stream,
                    version=version,
                    at_ms=self.at_ms,
                    command=command,
                    ordinal=ordinal,
                    event=event,
                    actor=actor,
                    operation=operation,
                    because=self.position - 1 or None,
                    trace="t1",
                )
            )
        return made
