"""A request's stream of lines, from any character on, for the one reader that it has."""

from typing import Any

import msgspec
from aiohttp import web

from worker.frontend.inflight import Inflight
from worker.frontend.requests import Requests

_encode = msgspec.json.Encoder().encode


def line(**fields: Any) -> bytes:
    return _encode(fields) + b"\n"


async def stream(request: web.Request, requests: Requests, inflight: Inflight, after_chars: int) -> web.StreamResponse:
    """Send all from character `after_chars` on, until the end, or until another reader comes.

    A reader that goes away cancels this coroutine; the request is aborted a little later unless a reader comes back.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    has_all = False
    requests.read_by(inflight, response)
    try:
        await response.prepare(request)
        await response.write(line(t="start", prompt_tokens=len(inflight.opened.prompt)))
        has_all = await _send(response, inflight, after_chars)
        await response.write_eof()
    except ConnectionError:
        has_all = False  # the reader went while we wrote
    except BaseException:
        has_all = False
        raise
    finally:
        requests.left_by(inflight, response, has_all=has_all)
    return response


async def _send(response: web.StreamResponse, inflight: Inflight, sent: int) -> bool:
    """Return whether the end was sent; False: another reader has taken over."""
    while inflight.reader is response:
        closed, text = inflight.closed, inflight.text
        if len(text) > sent:
            await response.write(line(t="delta", text=text[sent:], tokens=inflight.counted))
            sent = len(text)
        elif closed is not None:
            await response.write(_last(inflight))
            return True
        else:
            inflight.changed.clear()
            await inflight.changed.wait()
    return False


def _last(inflight: Inflight) -> bytes:
    closed, chars, count = inflight.closed, len(inflight.text), inflight.counted
    assert closed is not None
    if closed.error:
        return line(t="error", code=closed.reason, message=closed.message, chars=chars, completion_tokens=count)
    prompt_tokens = len(inflight.opened.prompt)
    return line(t="end", finish_reason=closed.reason, prompt_tokens=prompt_tokens, completion_tokens=count, chars=chars)
