"""Cookies, login codes, token texts."""

import os
import time
from pathlib import Path

import pytest

from web.errors import ApiError
from web.sessions import ATTEMPTS, Sessions
from web.tokens import CODE_S, digest, drop_old_codes, issue_login_code, matches, split, use_login_code


def sessions_of(data: Path, key: str = "key", port: int = 8480) -> Sessions:
    return Sessions(key, port, data / "left")


def test_a_session_is_good_with_its_own_key_until_it_is_revoked(tmp_path: Path) -> None:
    sessions = sessions_of(tmp_path, "key", 8480)
    value = sessions.issue()
    assert sessions.read(value)
    assert not sessions_of(tmp_path, "other", 8480).read(value)
    sessions.revoke(value)
    assert not sessions.read(value)
    assert sessions.read(sessions.issue())
    assert not sessions_of(tmp_path).read(value), "the next process knows it too"
    assert (tmp_path / "left").stat().st_mode & 0o777 == 0o600


def test_what_can_not_be_kept_of_log_outs_ends_nobody(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    sessions = sessions_of(tmp_path)
    value = sessions.issue()
    sessions.revoke(value)
    assert not sessions.read(value)


def test_a_session_says_which_token_opened_it_and_which_plane_it_is_of(tmp_path: Path) -> None:
    sessions = sessions_of(tmp_path, "key", 8480)
    session = sessions.read(sessions.issue("abc"))
    assert session is not None
    assert session.token == "abc"
    assert sessions.cookie != sessions_of(tmp_path, "key", 8481).cookie


@pytest.mark.parametrize("value", ["", ".", "..", "1.x.y", "9999999999.n.", "9999999999.n.é", "a.b.c.d"])
def test_a_forged_session_is_not(value: str, tmp_path: Path) -> None:
    assert not sessions_of(tmp_path, "key", 8480).read(value)


def test_a_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.sessions.SESSION_S", -1)
    sessions = sessions_of(tmp_path, "key", 8480)
    assert not sessions.read(sessions.issue())


def test_failed_log_ins_are_limited(tmp_path: Path) -> None:
    sessions = sessions_of(tmp_path, "key", 8480)
    for _ in range(ATTEMPTS):
        sessions.allow_attempt()
        sessions.failed()
    with pytest.raises(ApiError) as caught:
        sessions.allow_attempt()
    assert caught.value.status == 429
    assert int(caught.value.headers["retry-after"]) <= 60


def test_a_login_code_is_good_once_and_not_for_long(tmp_path: Path) -> None:
    code = issue_login_code(tmp_path)
    assert (tmp_path / "secrets" / "login").stat().st_mode & 0o777 == 0o700
    assert use_login_code(tmp_path, code)
    assert not use_login_code(tmp_path, code)
    old = issue_login_code(tmp_path)
    path = tmp_path / "secrets" / "login" / digest(old).hex()
    assert path.stat().st_mode & 0o777 == 0o600
    os.utime(path, (0, time.time() - CODE_S - 1))
    assert not use_login_code(tmp_path, old)
    forgotten = issue_login_code(tmp_path)
    os.utime(tmp_path / "secrets" / "login" / digest(forgotten).hex(), (0, 0))
    drop_old_codes(tmp_path)
    assert list((tmp_path / "secrets" / "login").iterdir()) == []


@pytest.mark.parametrize("text", ["", "eh_", "eh_a", "eh__b", "eh_a_", "sk_a_b", "x"])
def test_what_is_no_token(text: str) -> None:
    assert split(text) is None


def test_a_tokens_secret_may_hold_underscores() -> None:
    assert split("eh_abc_de_f") == ("abc", "de_f")
    assert matches("de_f", digest("de_f"))
    assert not matches("de_g", digest("de_f"))
