"""Stop strings, wherever the borders of tokens fall."""

from hypothesis import given
from hypothesis import strategies as st

from worker.frontend.stops import Stops


def run(stops: tuple[str, ...], parts: list[str]) -> tuple[str, str | None]:
    watch = Stops(stops)
    text = "".join(watch.feed(part) for part in parts)
    return text + watch.flush(), watch.found


def slowly(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """What must come out, a character at a time and looking back at all of it."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_what_only_began_like_a_stop_string_is_given_out() -> None:
    assert run(("END-OF-ROW",), ["END", "LESS list"]) == ("ENDLESS list", None)


def test_nothing_of_a_stop_string_is_given_out() -> None:
    watch = Stops(("END-OF-ROW",))
    assert [watch.feed(part) for part in ("a END-OF", "-ROW more", "and more")] == ["a ", "", ""]
    assert (watch.flush(), watch.found) == ("", "END-OF-ROW")


def test_the_first_to_be_complete_wins_and_the_longer_of_two_that_end_together() -> None:
    assert run(("abcd", "bc"), ["xabcd"]) == ("xa", "bc")
    assert run(("bc", "abc"), ["xa", "bc"]) == ("x", "abc")


def test_a_stop_string_that_begins_within_a_failed_one_is_found() -> None:
    assert run(("aab",), ["a", "a", "a", "b"]) == ("a", "aab")


@given(
    st.lists(st.text("ab-", min_size=1, max_size=4), min_size=0, max_size=4).map(tuple),
    st.lists(st.text("ab-x", max_size=4), max_size=8),
)
def test_borders_make_no_difference(stops: tuple[str, ...], parts: list[str]) -> None:
    assert run(stops, parts) == slowly(stops, "".join(parts))
