"""A port that is kept is its server's alone, before it listens and while it is away."""

import asyncio
import socket

import pytest

from controlplane.reservation import Reservation


def test_nobody_else_gets_it() -> None:
    with Reservation("127.0.0.1") as kept, socket.socket() as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", kept.port))
        with pytest.raises(OSError, match="in use"):  # as its own source, once a server that it calls again and again is away
            socket.create_connection(("127.0.0.1", kept.port), source_address=("127.0.0.1", kept.port))


async def test_its_server_may_come_and_go() -> None:
    with Reservation("127.0.0.1") as kept:
        for _ in range(2):
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", kept.port)
            reader, writer = await asyncio.open_connection("127.0.0.1", kept.port)
            assert await reader.read() == b""
            writer.close()
            server.close()
            await server.wait_closed()


def test_one_that_somebody_listens_on_is_not_to_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        Reservation("127.0.0.1", server.getsockname()[1])


def test_it_is_given_up_once() -> None:
    with Reservation("127.0.0.1") as kept:
        assert kept.close.alive
    assert not kept.close.alive
    kept.close()
