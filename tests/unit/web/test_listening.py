"""How the web process listens."""

import socket

from web.server import _listen


def test_no_packet_of_an_answer_waits_for_the_one_before_it_whatever_loop_serves() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
