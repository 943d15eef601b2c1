"""The log in Postgres. The append is one prepared call on a connection of its own; reads borrow from a small pool."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Self

import asyncpg

from controlplane.envelope import Recorded, decode_event, encode_event
from controlplane.log.contract import CellHeld, Conflict, Full, HeadMoved, Repeated, Snapshot, StaleEpoch, Unstorable, weigh
from controlplane.log.holding import change
from controlplane.log.thinning import Place, leaving

APPEND_S: Final = 20.0
"""A commit that takes longer is given up, and the writer with it: a disk that hangs must not look like a busy one."""
CONNECT_S: Final = 10.0
READERS: Final = 4
AWAY: Final = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What a read raises while the server is away. The last: a pool whose connection breaks just as it is given back."""
COLUMNS: Final = "position, stream, version, type, v, at, command, ordinal, operation, because, actor, trace, data::text"
SNAPSHOT: Final = (
    "select position, evolve_version, state, digest from snapshot where evolve_version = $1 and position > $2 "
    "and position <= coalesce($3, 9223372036854775807) order by position desc limit 1"
)
_APPEND: Final = f"select append({', '.join(f'${n}' for n in range(1, 20))})"
_TRY_ROOM: Final = (
    "create temporary table room on commit drop as select n, md5(n::text) || md5((n + 1)::text) from generate_series(1, 4000) n"
)
"""Half a MiB of new pages, on the disk where the events are."""
_REFUSALS: Final = {"EH001": StaleEpoch, "EH002": HeadMoved, "EH004": Conflict}


def readers(url: str, *, size: int = READERS) -> asyncpg.Pool:
    """A pool that connects when first asked, and anew where the server has ended a connection. `await` it before use."""
    return asyncpg.create_pool(url, min_size=0, max_size=size, timeout=CONNECT_S, reset=_nothing)


async def _nothing(_connection: Any) -> None:
    """Readers leave no state behind on a connection: none is reset, which would be a round trip more for each read."""


class PostgresLog:
    """See `contract.Log`. `open` connects, `close` ends it. Only one task may append."""

    def __init__(self, pool: asyncpg.Pool, writer: Any, append: Any) -> None:
        self._pool = pool
        self._writer = writer
        self._append = append

    @classmethod
    async def open(cls, url: str) -> Self:
        writer = await asyncpg.connect(url, timeout=CONNECT_S)
        append = await writer.prepare(_APPEND)
        return cls(await readers(url), writer, append)

    async def close(self) -> None:
        await self._writer.close()
        await self._pool.close()

    async def append(self, epoch: int, events: Sequence[Recorded]) -> None:
        try:
            await self._append.fetchval(*_arrays(epoch, events), timeout=APPEND_S)
        except asyncpg.UniqueViolationError as error:
            raise await self._violation(error, events) from error
        except (asyncpg.DataError, UnicodeEncodeError) as error:
            raise Unstorable(f"{error}") from error
        except asyncpg.DiskFullError as error:  # in the statement, so all of it was rolled back; at a commit Postgres panics
            raise Full(error.args[0]) from error
        except asyncpg.PostgresError as error:
            refusal = _REFUSALS.get(error.sqlstate)
            if refusal is None:
                raise
            raise refusal(error.args[0]) from error

    async def _violation(self, error: Any, events: Sequence[Recorded]) -> Exception:
        if error.constraint_name == "holding_cell":
            return CellHeld(error.detail)
        repeated = await self.of_commands(list({event.command for event in events}))
        return Repeated(repeated) if repeated else Conflict(f"{error.args[0]}: {error.detail}")

    async def room(self) -> None:
        async with self._reading() as connection:
            trying = connection.transaction()
            await trying.start()
            try:
                await connection.execute(_TRY_ROOM, timeout=APPEND_S)
            except asyncpg.DiskFullError as error:
                raise Full(error.args[0]) from error
            except asyncpg.InsufficientPrivilegeError:
                pass  # a role without TEMP can't try: the next append will tell
            finally:
                await trying.rollback()

    async def begin_reign(self, host: str, pid: int) -> int:
        async with self._reading() as connection:
            epoch: int = await connection.fetchval("select begin_reign($1, $2)", host, pid)
            return epoch

    async def head(self) -> int:
        async with self._reading() as connection:
            position: int = await connection.fetchval("select position from head")
            return position

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]:
        return await self._rows("position > $1 order by position limit $2", after, limit)

    async def of_commands(self, commands: Sequence[str]) -> dict[str, list[Recorded]]:
        found: dict[str, list[Recorded]] = {}
        for event in await self._rows("command = any($1::text[]) order by position", list(commands)):
            found.setdefault(event.command, []).append(event)
        return found

    async def of_command(self, command: str) -> list[Recorded]:
        return (await self.of_commands([command])).get(command, [])

    async def of_stream(self, stream: str, after_version: int = 0, limit: int = 1000) -> list[Recorded]:
        return await self._rows("stream = $1 and version > $2 order by version limit $3", stream, after_version, limit)

    async def first_since(self, at_ms: int) -> int:
        async with self._reading() as connection:
            first: int = await connection.fetchval("select first_since($1)", at_ms)
            return first

    async def holding(self) -> tuple[int, dict[tuple[str, int], int]]:
        async with self._reading() as connection:
            rows = await connection.fetch("select position, device, cell, number from head left join holding on true")
            return rows[0][0], {(device, cell): number for _, device, cell, number in rows if device is not None}

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        async with self._reading() as connection, connection.transaction():
            await connection.execute(
                "insert into snapshot (position, evolve_version, state, digest) values ($1, $2, $3, $4) on conflict do nothing",
                snapshot.position, snapshot.evolve_version, snapshot.state, snapshot.digest,
            )  # fmt: skip
            stored = [Place(*row) for row in await connection.fetch("select position, evolve_version from snapshot")]
            await connection.executemany(
                "delete from snapshot where position = $1 and evolve_version = $2", leaving(stored, snapshot.evolve_version)
            )

    async def snapshot(self, evolve_version: int, *, after: int = 0, up_to: int | None = None) -> Snapshot | None:
        async with self._reading() as connection:
            row = await connection.fetchrow(SNAPSHOT, evolve_version, after, up_to)
            return None if row is None else Snapshot(*row)

    async def _rows(self, condition: str, *arguments: object) -> list[Recorded]:
        async with self._reading() as connection:
            rows = await connection.fetch(f"select {COLUMNS} from event where {condition}", *arguments)  # noqa: S608
        return [recorded(row) for row in rows]

    def _reading(self) -> AbstractAsyncContextManager[Any]:
        borrowed: AbstractAsyncContextManager[Any] = self._pool.acquire()
        return borrowed


def recorded(row: Sequence[Any]) -> Recorded:
    """Rebuild an event from a row of COLUMNS."""
    position, stream, version, name, v, at, command, ordinal, operation, because, actor, trace, data = row
    return Recorded(
        position=position, stream=stream, version=version, at_ms=round(at.timestamp() * 1000), command=command, ordinal=ordinal,
        event=decode_event(name, v, data), operation=operation, because=because, actor=actor, trace=trace,
    )  # fmt: skip


def _data(event: Recorded) -> str:
    encoded = encode_event(event.event)
    weigh(event, encoded)
    return encoded.decode()


def _arrays(epoch: int, events: Sequence[Recorded]) -> tuple[object, ...]:
    """The arguments of `append`, one list per column."""
    for position, event in enumerate(events, events[0].position):
        if event.position != position:
            raise Conflict(f"event {event.position} stands at position {position}")
    net = change(events)
    return (
        epoch, events[0].position - 1,
        [event.stream for event in events], [event.version for event in events], [event.type for event in events],
        [event.event.V for event in events], [event.at_ms for event in events], [event.command for event in events],
        [event.ordinal for event in events], [event.operation for event in events], [event.because for event in events],
        [event.actor for event in events], [event.trace for event in events],
        [_data(event) for event in events],
        [device for device, _ in net.freed], [number for _, number in net.freed],
        [device for device, _, _ in net.held], [cell for _, cell, _ in net.held], [number for _, _, number in net.held],
    )  # fmt: skip
