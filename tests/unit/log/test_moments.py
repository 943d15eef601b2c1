"""How moments of the log are written and read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.moments import Position, Time, as_it_was, utc, when

AT_MS = 1_795_958_401_301


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("4711", Position(4711)), (" 4711 ", Position(4711)), ("0", Position(0)),
        ("2026-11-29T13:20:01.301Z", Time(AT_MS)), ("2026-11-29 13:20:01.301 UTC", Time(AT_MS)),
        ("2026-11-29T13:20:01.301", Time(AT_MS)), ("2026-11-29T15:20:01.301+02:00", Time(AT_MS)),
        ("2026-11-29T13:20:01.301999Z", Time(AT_MS)), ("2026-11-29T13:20:01Z", Time(AT_MS - 301)),
        ("2026-11-29T13:20Z", Time(AT_MS - 1_301)), ("1969-12-31T23:59:59.9995Z", Time(-1)),
    ],
)  # fmt: skip
def test_a_moment_is_a_position_or_a_time_in_utc(text: str, meant: Position | Time) -> None:
    assert when(text) == meant


NONSENSE = (
    "",
    "yesterday",
    "-1",
    "4.7",
    "1e3",
    "٤٧١١",
    "²",
    "2026-13-01T00:00Z",
    "13:20",
    "9" * 100,
    "0001-01-01T00:00+23:00",
    "\0",
)


@pytest.mark.parametrize("text", NONSENSE)
def test_what_is_neither_is_refused_with_what_can_be_written(text: str) -> None:
    with pytest.raises(ValueError, match="is no moment; write a position of the log such as 4711, or a time in UTC") as refused:
        when(text)
    assert len(str(refused.value)) < 300


@given(st.integers(-62_135_596_800_000, 253_402_300_799_999))
def test_a_time_that_is_shown_can_be_asked_for(at_ms: int) -> None:
    assert when(utc(at_ms)) == Time(at_ms)


def test_the_past_is_named_by_its_event_and_its_time() -> None:
    assert as_it_was(4711, AT_MS) == "as it was after event 4711, 2026-11-29 13:20:01.301 UTC"
