"""The least that a command across NATS could cost: receive, commit one row, answer. Arguments: URL TOKEN SUBJECT DATABASE."""

import asyncio
import sys

import asyncpg
import nats
import uvloop
from nats.aio.msg import Msg


async def main(url: str, token: str, subject: str, database: str) -> None:
    rows = await asyncpg.connect(database)
    bus = await nats.connect(url, token=token)

    async def answer(message: Msg) -> None:
        await rows.execute("insert into bare values (1)")
        await message.respond(b"y")

    await bus.subscribe(subject, cb=answer)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
