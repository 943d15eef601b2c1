"""What `up` finds in its way before it starts anything."""

import socket

import pytest

from compose.refusal import EnvironmentRefusal
from compose.up import reserved


def test_a_port_that_another_has_is_to_be_freed_and_an_address_of_nobody_here_to_be_changed() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(EnvironmentRefusal, match="--port") as taken:
            reserved("127.0.0.1", other.getsockname()[1])
    assert taken.value.code == "port_taken"
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(EnvironmentRefusal, match="--host") as foreign:
            reserved(host, 0)
        assert foreign.value.code == "no_such_address"


def test_any_free_port_is_found() -> None:
    with reserved("127.0.0.1", 0) as kept:
        assert kept.port > 0
