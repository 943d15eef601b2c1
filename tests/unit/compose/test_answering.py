"""What `doctor` says of processes that do not answer."""

import time

from compose.checks import answering
from compose.childstate import ChildState, State


def child(name: str, state: State = "ready", *, ago_s: float = 0, last_exit: str = "") -> ChildState:
    since_ms = time.time_ns() // 1_000_000 - round(1000 * ago_s)
    return ChildState(name=name, state=state, pid=7, since_ms=since_ms, restarts=bool(last_exit), last_exit=last_exit)


def test_all_answer() -> None:
    [check] = answering([child("web"), child("nats", last_exit="killed by SIGKILL")])
    assert (check.verdict, check.found) == ("ok", "web, nats")


def test_one_that_is_silent_is_bad_and_says_for_how_long() -> None:
    [check] = answering([child("web"), child("nats", "silent", ago_s=41.5)])
    assert (check.verdict, check.found) == ("bad", "nats (pid 7) has not answered for 41 s")
    assert "logs/nats.log" in check.cure


def test_one_that_is_not_watched_for_a_fault_is_bad() -> None:
    [check] = answering([child("web"), child("nats", "unwatched")])
    assert (check.verdict, check.found.split(";")[0]) == ("bad", "nats (pid 7) runs")
    assert "logs/up.log" in check.cure


def test_one_that_was_started_again_for_that_is_worth_a_note() -> None:
    [check] = answering([child("web", last_exit="killed: it gave no answer for 60 s, 6 questions, and was stopped")])
    assert check.verdict == "note"
    assert "gave no answer for 60 s" in check.found


def test_nothing_is_said_of_nobody() -> None:
    assert list(answering([])) == []


def test_one_that_has_ended_does_not_answer_whatever_it_ended_of() -> None:
    exit_ = "killed: it gave no answer for 61 s, 6 questions, and did nothing; can't be started again: the disk is full"
    [check] = answering([child("web"), child("postgres", "waiting", last_exit=exit_)])
    assert (check.verdict, check.found) == ("bad", f"postgres has ended: {exit_}")
    [check] = answering([child("web"), child("worker", "starting")])
    assert (check.verdict, check.found) == ("ok", "web")
