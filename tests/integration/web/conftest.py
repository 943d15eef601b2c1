from collections.abc import AsyncIterator

import pytest

from controlplane.plane import Plane
from tests.integration.web.house import House, opened
from tests.servers import bus, database, log, nats_server, owner_database, plane, postgres_server, server_directory

__all__ = ["bus", "database", "log", "nats_server", "owner_database", "plane", "postgres_server", "server_directory"]


@pytest.fixture
async def house(plane: Plane) -> AsyncIterator[House]:
    """A plane with one node of one device, and no model yet."""
    async with opened(plane) as started:
        yield started
