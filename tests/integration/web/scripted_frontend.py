"""A frontend by script: it speaks the wire to web and generates what the test says, when the test says."""

import asyncio
import contextlib
from typing import Any

import msgspec
from aiohttp import web

TOKEN = "node-token"


class Script:
    """How generations go. Change it before or while they run."""

    def __init__(self) -> None:
        self.pieces: list[str] = ["one ", "two ", "three"]
        self.prompt_tokens = 7
        self.gate = asyncio.Event()
        """Cleared: a generation stops before its next piece and waits."""
        self.gate.set()
        self.fault: dict[str, Any] | None = None
        """Sent instead of the end, once."""
        self.fault_after = 0
        """Pieces that are sent before the fault."""
        self.reject: tuple[int, dict[str, Any]] | None = None
        """Answered to `/generate` instead, once."""
        self.cut_after: int | None = None
        """Cut the connection after so many pieces, once."""


class ScriptedFrontend:
    """Attributes: script, generated (request ids in order of arrival), aborted, reattached, running."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.generated: list[str] = []
        self.aborted: list[str] = []
        self.reattached: list[tuple[str, int]] = []
        self.running = 0
        self._begun: set[tuple[str, int]] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([
            web.post("/generate", self._generate), web.get("/requests/{request}", self._reattach),
            web.delete("/requests/{request}", self._abort),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: connections break."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        wish = msgspec.json.decode(await request.read())
        script = self.script
        if script.reject is not None:
            (status, body), script.reject = script.reject, None
            return web.json_response(body, status=status)
        key = (wish["request"], wish["attempt"])
        if key in self._begun:
            return web.json_response({"code": "request_exists", "message": "known"}, status=409)
        self._begun.add(key)
        self.generated.append(wish["request"])
        return await self._stream(request, 0)

    async def _reattach(self, request: web.Request) -> web.StreamResponse:
        name, after = request.match_info["request"], int(request.query["after_chars"])
        self.reattached.append((name, after))
        if not any(name == known for known, _ in self._begun):
            return web.json_response({"code": "request_unknown", "message": "unknown"}, status=404)
        return await self._stream(request, after)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append(request.match_info["request"])
        return web.json_response({"completion_tokens": 2})

    async def _stream(self, request: web.Request, after: int) -> web.StreamResponse:
        script = self.script
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        self.running += 1
        try:
            await _line(response, {"t": "start", "prompt_tokens": script.prompt_tokens})
            chars = 0
            for number, piece in enumerate(script.pieces, start=1):
                if script.fault is not None and number > script.fault_after:
                    break
                await script.gate.wait()
                chars += len(piece)
                if chars > after:
                    fresh = piece[max(0, len(piece) - (chars - after)) :]
                    await _line(response, {"t": "delta", "text": fresh, "tokens": number})
                if script.cut_after == number:
                    script.cut_after = None
                    assert request.transport is not None
                    request.transport.abort()
                    return response
            if script.fault is not None:
                fault, script.fault = script.fault, None
                await _line(response, {"t": "error", "chars": chars, "completion_tokens": 0, **fault})
            else:
                end = {"t": "end", "finish_reason": "stop", "prompt_tokens": script.prompt_tokens, "chars": chars}
                await _line(response, {**end, "completion_tokens": len(script.pieces)})
            with contextlib.suppress(ConnectionError):
                await response.write_eof()
        finally:
            self.running -= 1
        return response


async def _line(response: web.StreamResponse, fields: dict[str, Any]) -> None:
    await response.write(msgspec.json.encode(fields) + b"\n")
