"""The frontend of one instance: `python -m worker.frontend.server --data DIR --instance ID --port P`.

Between web's HTTP streams and the engine's token ids. It holds what an engine must not: text, templates, stop strings and
the record of every request in flight.
"""

import argparse
import asyncio
import contextlib
import hmac
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from controlplane import lean
from controlplane.logs import write_json_lines
from controlplane.plane import Plane
from worker.frontend.chat import load
from worker.frontend.enginelink import EngineLink
from worker.frontend.generate import Wish, opened
from worker.frontend.inflight import Inflight
from worker.frontend.request import Invalid
from worker.frontend.requests import RequestExists, Requests
from worker.frontend.serving import Admission, NotServing, Serving
from worker.frontend.stream import stream

MOST_BODY_BYTES: Final = 64 * 2**20
"""A prompt of ten million tokens; web limits callers to less."""
END_S: Final = 3.0
LOOK_S: Final = 1.0
"""Between two looks whether this is still the instance's frontend: a worker that dies just as it has started one knows nothing
of it, and its successor starts another."""

_wish: Final = msgspec.json.Decoder(Wish)
_serving: Final = msgspec.json.Decoder(Serving)


def _loaded(source: Path) -> None:
    """Load ahead; what is wrong with a source is said when it is to be served."""
    with contextlib.suppress(ValueError, OSError):
        load(source)


class Frontend:
    """The HTTP side."""

    def __init__(self, requests: Requests, link: EngineLink, admission: Admission, node_token: str) -> None:
        self._requests, self._link, self._admission = requests, link, admission
        self._secret = f"Bearer {node_token}".encode()
        self._ahead: asyncio.Future[None] | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._authorised], client_max_size=MOST_BODY_BYTES)
        app.add_routes([
            web.put("/source", self._read_ahead), web.put("/serving", self._serve), web.delete("/serving", self._shut),
            web.get("/status", self._status), web.post("/generate", self._generate),
            web.get("/requests/{request}", self._reattach), web.delete("/requests/{request}", self._abort),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _authorised(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._secret):
            return refusal(401, "unauthorized", "this needs the node's token")
        try:
            return await handler(request)
        except Invalid as invalid:
            return refusal(400, invalid.code, invalid.message, invalid.param)
        except msgspec.MsgspecError as error:
            return refusal(400, "invalid", f"the body can't be read: {error}")

    async def _read_ahead(self, request: web.Request) -> web.Response:
        """Begin to load what a model to be served needs; its directory is the body. Nothing waits for it."""
        source = Path((await request.read()).decode())
        self._ahead = asyncio.ensure_future(asyncio.to_thread(_loaded, source))
        return self._told()

    async def _serve(self, request: web.Request) -> web.Response:
        serving = _serving.decode(await request.read())
        try:
            if self._ahead is not None:
                await self._ahead
            await asyncio.to_thread(load, Path(serving.source))
        except ValueError as error:
            return refusal(400, "bad_source", str(error))
        await self._admission.open(serving)
        return self._told()

    async def _shut(self, request: web.Request) -> web.Response:
        """Admit nothing more; with `?abort=1` also end what still runs, with a typed error."""
        await self._admission.shut()
        if request.query.get("abort") == "1":
            self._requests.abort_all()
        return self._told()

    async def _status(self, _: web.Request) -> web.Response:
        return self._told()

    def _told(self) -> web.Response:
        return answer({
            "serving": msgspec.to_builtins(self._admission.serving), "running": self._requests.running(),
            "engine_connected": self._link.up, "tokens_per_s": self._requests.tokens_per_s(),
        })  # fmt: skip

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        wish = _wish.decode(await request.read())
        try:
            serving = await self._admission.enter(wish.model, wish.grant)
            begun = await opened(wish, serving)
            if self._admission.serving is not serving:  # shut while the prompt was made into ids
                raise NotServing(f"{wish.model!r} under grant {wish.grant} is not served here any more")
            inflight = self._requests.open(begun)
        except NotServing as error:
            return refusal(409, "not_serving", str(error))
        except RequestExists:
            return refusal(409, "request_exists", f"{wish.request} attempt {wish.attempt} is known: read on with GET /requests")
        except ValueError as error:
            raise Invalid(str(error), "request") from error
        return await stream(request, self._requests, inflight, 0)

    async def _reattach(self, request: web.Request) -> web.StreamResponse:
        after = request.query.get("after_chars", "0")
        if not after.isdecimal():
            raise Invalid(f"'after_chars' must be a whole number, not {after!r}", "after_chars")
        inflight = self._named(request)
        return unknown(request) if inflight is None else await stream(request, self._requests, inflight, int(after))

    async def _abort(self, request: web.Request) -> web.Response:
        inflight = self._named(request)
        if inflight is None:
            return unknown(request)
        self._requests.abort(inflight)
        if inflight.reader is None:
            self._requests.left_by(inflight, None, has_all=True)
        return answer({"completion_tokens": inflight.counted})

    def _named(self, request: web.Request) -> Inflight | None:
        return self._requests.find(request.match_info["request"])


def answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def refusal(status: int, code: str, message: str, param: str | None = None) -> web.Response:
    return answer({"code": code, "message": message, "param": param}, status)


def unknown(request: web.Request) -> web.Response:
    return refusal(404, "request_unknown", f"no request {request.match_info['request']!r} is in flight here")


async def serve(plane: Plane, instance: str, port: int, ready: Callable[[int], None] = lambda port: None) -> None:
    """Serve until SIGTERM. `ready` hears the port."""
    directory = Path(plane.data) / "run" / "inst" / instance
    requests = Requests(directory / "record", lambda message: link.send(message))  # noqa: PLW0108 (made below)
    link = EngineLink(directory / "tokens.sock", requests)
    requests.recover()
    await link.listen()
    frontend = Frontend(requests, link, Admission(), plane.node_token)
    runner = web.AppRunner(frontend.app(), handler_cancellation=True, access_log=None, shutdown_timeout=END_S)
    await runner.setup()
    site = web.TCPSite(runner, plane.node_address, port)
    await site.start()
    publish(directory, runner.addresses[0][1])
    ready(runner.addresses[0][1])
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    while not (ended.is_set() or link.replaced()):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await ended.wait()
    await runner.cleanup()
    await link.close()
    requests.close()


def publish(directory: Path, port: int) -> None:
    """Write `frontend.json`, whole or not at all."""
    draft = directory / "frontend.json.new"
    draft.write_bytes(msgspec.json.encode({"pid": os.getpid(), "port": port}))
    draft.replace(directory / "frontend.json")


def main() -> int:
    lean.started()
    parser = argparse.ArgumentParser(prog="worker.frontend.server")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    os.umask(0o077)
    write_json_lines()
    import uvloop  # noqa: PLC0415 (where it is used)

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(Plane.read(options.data), options.instance, options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
