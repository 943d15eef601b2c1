"""Browser sessions: a signed cookie that says until when it is good, and which token opened it. Logging out is remembered."""

import hashlib
import hmac
import os
import secrets
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec
import structlog

from web.errors import ApiError

_log = structlog.get_logger(__name__)

SESSION_S: Final = 12 * 3600
"""A working day."""
ATTEMPTS: Final = 10
WINDOW_S: Final = 60.0
"""At most so many failed log-ins in so long, from everybody together."""


class Session(msgspec.Struct, frozen=True):
    """What a valid cookie says."""

    until: int
    """Unix seconds."""
    nonce: str
    token: str
    """Id of the API token that was given for it, and without which it ends; empty: a login link was."""


class Sessions:
    """Issues and checks the cookie's value: `<until>.<nonce>.<token id>.<signature>`. Attributes: cookie (its name)."""

    def __init__(self, key: str, port: int, left: Path) -> None:
        """port: of this plane; a browser keeps one jar for all ports of a host, and two planes may be there.
        left: file of the sessions that were left, for the next process."""
        self.cookie = f"enginehouse_session_{port}"
        self._left = left
        self._key = hashlib.sha256(b"enginehouse session " + key.encode()).digest()
        self._revoked = _read(left)
        self._failures: deque[float] = deque()

    def issue(self, token: str = "") -> str:
        text = f"{int(time.time()) + SESSION_S}.{secrets.token_urlsafe(18)}.{token}"
        return f"{text}.{self._sign(text)}"

    def read(self, value: str) -> Session | None:
        """The session that a cookie's value stands for; None: it is forged, over, or was left."""
        text, _, signature = value.rpartition(".")
        if not signature.isascii() or not hmac.compare_digest(self._sign(text), signature):
            return None
        until, nonce, token = text.split(".")
        good = int(until) > time.time() and nonce not in self._revoked
        return Session(int(until), nonce, token) if good else None

    def revoke(self, value: str) -> None:
        """Log out: this value is void from now on."""
        if (session := self.read(value)) is None:
            return
        now = time.time()
        self._revoked = {nonce: end for nonce, end in self._revoked.items() if end > now}
        self._revoked[session.nonce] = session.until
        draft = self._left.with_suffix(".new")
        try:
            with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(msgspec.json.encode(self._revoked))
            draft.rename(self._left)
        except OSError as error:  # of this process it is void all the same
            _log.warning("logout_not_kept", file=str(self._left), reason=repr(error))

    def allow_attempt(self) -> None:
        """Raises ApiError (429) after too many failed log-ins."""
        now = time.monotonic()
        while self._failures and now - self._failures[0] > WINDOW_S:
            self._failures.popleft()
        if len(self._failures) >= ATTEMPTS:
            wait_ms = round((WINDOW_S - (now - self._failures[0])) * 1000)
            message = f"{ATTEMPTS} log-ins failed within {WINDOW_S:.0f} s; wait a little"
            raise ApiError(429, "too_many_attempts", message, retry_after_ms=wait_ms)

    def failed(self) -> None:
        self._failures.append(time.monotonic())

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _read(left: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(left.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("logouts_not_read", file=str(left), reason=repr(error))
        return {}
