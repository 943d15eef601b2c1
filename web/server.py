"""`python -m web.server --data DIR`: the web process. Serves until SIGTERM or SIGINT, then closes streams first, and exits."""

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import structlog
import uvicorn
import uvloop

from controlplane import lean
from controlplane.logs import write_json_lines
from controlplane.plane import Plane
from web.app import create_app, guarded
from web.metrics import PlaneFigures
from web.services import Services

_log = structlog.get_logger("web")

DRAIN_S: Final = 1
"""What is still open after the streams were closed is a plain request; it is cut after this."""
BACKLOG: Final = 2048


class NotFollowing(Exception):
    """This process has stopped following the plane and can't serve any more; whoever supervises it starts another."""


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would wait for open streams before anything else is told to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(plane: Plane, stop: asyncio.Event, started: Callable[[Services, int], None] = lambda _, __: None) -> None:
    """Serve until `stop`; `started` hears the port. Raises OSError when the address is taken, NotFollowing."""
    listener = _listen(plane.web_host, plane.web_port)
    services = Services.make(plane)
    app = create_app(services)
    figures = PlaneFigures(services.view, services.gateway)
    config = uvicorn.Config(
        guarded(app, services), http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=DRAIN_S, timeout_keep_alive=75, backlog=BACKLOG,
    )  # fmt: skip
    server = _Server(config)
    figures.register()
    try:
        with services.view.listening(figures.count):
            async with app.lifespan(), services.running() as following:
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                _log.info("web_serves", address="{}:{}".format(*listener.getsockname()[:2]))
                started(services, listener.getsockname()[1])
                stopped = asyncio.create_task(stop.wait())
                await asyncio.wait((serving, stopped, following), return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                _log.info("web_stops")
                server.should_exit = True
                await services.stop_streams()
                await serving
                failure = following.exception() if following.done() else None
        if failure is not None:  # out here: Litestar's lifespan would wrap it
            raise NotFollowing(repr(failure))
    finally:
        figures.unregister()
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections have it from here. uvloop says it to each as well, asyncio only to those whose protocol number is not 0; else
    # the second packet of an answer waits 40 ms for the first one to be acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


async def _main(data: Path) -> int:
    plane = Plane.read(data)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await serve(plane, stop)
    except OSError as error:
        _log.error("web_cannot_listen", host=plane.web_host, port=plane.web_port, reason=error.strerror)
        return 1
    except NotFollowing as error:
        _log.error("web_failed", reason=str(error))
        return 1
    return 0


def main() -> None:
    lean.started()
    parser = argparse.ArgumentParser(prog="python -m web.server", description="The web process of a plane.")
    parser.add_argument("--data", type=Path, required=True, help="the plane's data directory")
    arguments = parser.parse_args()
    write_json_lines()
    sys.exit(uvloop.run(_main(arguments.data)))


if __name__ == "__main__":
    main()
