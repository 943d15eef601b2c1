"""Client of the instances' frontends: one request's NDJSON stream, taken up again where it broke off."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Final

import msgspec

from controlplane.answer import Routed

if TYPE_CHECKING:
    import aiohttp

CONNECT_S: Final = 1.0
"""Loopback or one switch away: a frontend that is there accepts at once."""
SILENCE_S: Final = 300.0
"""Longest prefill that is waited for without a line: a long prompt on a CPU takes minutes, not more."""


class Start(msgspec.Struct, frozen=True, tag_field="t", tag="start"):
    prompt_tokens: int


class Delta(msgspec.Struct, frozen=True, tag_field="t", tag="delta"):
    text: str
    tokens: int
    """Output tokens so far."""


class Finish(msgspec.Struct, frozen=True, tag_field="t", tag="end"):
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    chars: int


class Fault(msgspec.Struct, frozen=True, tag_field="t", tag="error"):
    code: str
    message: str
    chars: int = 0
    completion_tokens: int = 0


Line = Start | Delta | Finish | Fault


class Rejected(Exception):
    """The frontend answered with an error status. `code`: not_serving, too_long, invalid, request_exists, request_unknown."""

    def __init__(self, status: int, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param


class _Problem(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""
    param: str | None = None


class _Aborted(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class Broken(Exception):
    """The connection could not be made, or broke before the last line."""


_lines = msgspec.json.Decoder(Line)
_problem = msgspec.json.Decoder(_Problem)


class Frontends:
    """One HTTP session for all frontends. `async with` it.

    Its library is imported when the first frontend is asked, or by `warm`: it takes a third as long as the web process needs
    to start, and until then nobody needs it.
    """

    def __init__(self, node_token: str) -> None:
        self._token = node_token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Frontends":
        return self

    def warm(self) -> None:
        """Import what the first request would have to. Blocks for a tenth of a second; may be called in a thread."""
        import aiohttp  # noqa: F401, PLC0415

    def _opened(self) -> "aiohttp.ClientSession":
        if self._session is None:
            self._session = self._open()
        return self._session

    def _open(self) -> "aiohttp.ClientSession":
        import aiohttp  # noqa: PLC0415

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
            headers={"authorization": f"Bearer {self._token}"},
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept-encoding"),
            read_bufsize=1 << 18,
        )

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, routed: Routed, kind: str, body: bytes) -> AsyncGenerator[list[Line], None]:
        """Start the request. Yields what each network read brought. Raises Rejected, Broken."""
        payload = msgspec.json.encode(
            {"request": routed.request, "attempt": routed.attempt, "model": routed.model, "grant": routed.grant, "kind": kind,
             "body": msgspec.Raw(body)}
        )  # fmt: skip
        async for lines in self._stream("POST", f"{routed.endpoint}/generate", payload):
            yield lines

    async def reattach(self, routed: Routed, after_chars: int) -> AsyncGenerator[list[Line], None]:
        """Take the request's stream up again after so many characters. Raises Rejected, Broken."""
        async for lines in self._stream("GET", f"{routed.endpoint}/requests/{routed.request}?after_chars={after_chars}", None):
            yield lines

    async def _stream(self, method: str, url: str, payload: bytes | None) -> AsyncGenerator[list[Line], None]:
        import aiohttp  # noqa: PLC0415

        try:
            async with self._opened().request(
                method, url, data=payload, headers={"content-type": "application/json"} if payload else None
            ) as response:
                if response.status != 200:
                    raise await _rejection(response)
                rest = b""
                async for chunk in response.content.iter_any():
                    whole, newline, tail = (rest + chunk).rpartition(b"\n")
                    rest = tail
                    if newline:
                        yield [_lines.decode(line) for line in whole.split(b"\n") if line]
        except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.DecodeError) as error:
            raise Broken(str(error) or type(error).__name__) from error

    async def abort(self, endpoint: str, request: str, deadline_s: float) -> int | None:
        """Stop a request in its engine. Return the tokens that it had generated, None if the frontend does not say."""
        import aiohttp  # noqa: PLC0415

        try:
            async with self._opened().delete(
                f"{endpoint}/requests/{request}", timeout=aiohttp.ClientTimeout(total=deadline_s)
            ) as response:
                if response.status != 200:
                    return None
                return msgspec.json.decode(await response.read(), type=_Aborted).completion_tokens
        except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.DecodeError):
            return None


async def _rejection(response: "aiohttp.ClientResponse") -> Rejected:
    raw = await response.read()
    try:
        problem = _problem.decode(raw)
    except msgspec.DecodeError:
        problem = _Problem()
    return Rejected(
        response.status, problem.code or f"http_{response.status}", problem.message or raw[:200].decode(errors="replace"),
        problem.param,
    )  # fmt: skip
