"""The cells whose locks a holder keeps for its engine, as descriptors, under the grant that they were given with."""

from pool.wire import close_all
from worker.holdermessages import Denied, TakeCells


class HeldCells:
    """`now`: what is held, None: nothing. A grant older than one that was seen before is refused."""

    def __init__(self) -> None:
        self.now: TakeCells | None = None
        self._locks: list[int] = []
        self._newest = 0

    def take(self, wanted: TakeCells, locks: list[int]) -> Denied | None:
        """Keep these locks from here on. When it is denied, they are still the caller's to close."""
        if wanted.grant < self._newest:
            return Denied(code="fenced", message=f"grant {wanted.grant} is older than {self._newest}, which was seen before")
        held = self.now
        if held is not None and held != wanted:
            return Denied(
                code="holds_cells",
                message=f"cells {_words(held)} are held under grant {held.grant}; "
                f"drop them before grant {wanted.grant} is taken",
            )
        self.drop()
        self.now, self._locks, self._newest = wanted, locks, wanted.grant
        return None

    def drop(self) -> None:
        close_all(self._locks)
        self.now, self._locks = None, []


def _words(held: TakeCells) -> str:
    return ", ".join(f"{share.numbers} of device {share.device}" for share in held.shares)
