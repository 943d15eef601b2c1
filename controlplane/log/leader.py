"""Leadership: one decider reigns, the others wait.

```
  waiting --(advisory lock got)--> leader --(begin_reign: epoch + 1)--> reigning --(lock's connection lost)--> process exits
```
Postgres alone says who leads: the session that holds the advisory lock. Losing that session proves nothing about who
leads now, so the process concludes only that it must stop. What it may still have under way can't do harm: an append
with its old epoch is refused once another has begun to reign.
"""

import asyncio
import contextlib
from typing import Any, Final, Self

import asyncpg

LOCK: Final = 0x656E6C64
""""enld"; advisory locks are of one database, so two planes in one server don't meet."""
PROBE_S: Final = 2.0
PROBE_LIMIT_S: Final = 5.0
CONNECT_S: Final = 10.0


class Leadership:
    """`acquire` waits for the lock; `lost` ends when it is gone; `epoch` is this reign's number."""

    def __init__(self, connection: Any, epoch: int) -> None:
        self._connection = connection
        self.epoch = epoch
        self._gone = asyncio.Event()
        connection.add_termination_listener(lambda _: self._gone.set())

    @classmethod
    async def acquire(cls, url: str, host: str, pid: int) -> Self:
        """Wait (for ever: a standby does) until no other decider leads, then begin a reign."""
        connection = await asyncpg.connect(url, timeout=CONNECT_S)
        try:
            await connection.execute("select pg_advisory_lock($1)", LOCK)
            epoch: int = await connection.fetchval("select begin_reign($1, $2)", host, pid)
        except BaseException:
            connection.terminate()
            raise
        return cls(connection, epoch)

    async def lost(self) -> None:
        """Return once the lock's session is gone or no longer answers: twice in a row, since the first time it may have been
        we who stood still, with the answer unread."""
        missed = 0
        while not self._gone.is_set() and missed < 2:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await self._gone.wait()
                    return
            try:
                async with asyncio.timeout(PROBE_LIMIT_S):  # of our own: after one that was late, the library waits for its end
                    await self._connection.fetchval("select 1")
                missed = 0
            except TimeoutError:
                missed += 1
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                return

    async def resign(self) -> None:
        """Give the lock up: a standby takes over at once."""
        await self._connection.close(timeout=1)
