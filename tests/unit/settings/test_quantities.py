"""Sizes, durations and shares."""

import pytest

from controlplane.quantities import duration_ms, human_bytes, need_and_limit, share_cells, size_bytes, times


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 << 30), ("1.5 KiB", 1536), ("2MB", 2_000_000), ("7", 7), (7, 7), ("1.1GiB", 1181116006), (0, 0)],
)
def test_sizes(text: object, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", -1, "1e9", "5 GiG", True, 1.5, None, "١GiB"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        size_bytes(text)


@pytest.mark.parametrize("text", ["0.3B", "2.7"])
def test_a_part_of_a_byte_is_refused_where_whole_ones_are_written(text: str) -> None:
    with pytest.raises(ValueError, match="no whole number of bytes"):
        size_bytes(text)


@pytest.mark.parametrize("text", ["0.5ms", "1.0005s"])
def test_a_part_of_a_millisecond_does_not_become_none_of_it(text: str) -> None:
    with pytest.raises(ValueError, match="no whole number of milliseconds"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("text", "ms"), [("5m", 300_000), ("1.5s", 1500), ("250ms", 250), ("2h", 7_200_000), ("1d", 86_400_000), ("never", None)]
)
def test_durations(text: str, ms: int | None) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize("text", ["3651d", "999999999999999999d"])
def test_durations_that_no_clock_holds(text: str) -> None:
    with pytest.raises(ValueError, match="longer than 3650 days"):
        duration_ms(text)


@pytest.mark.parametrize("text", ["", "5", 5, "m", "9" * 5000 + "s", "-1s", None, "5 minutes"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("share", "cells"),
    [(1, 8), ("1", 8), (0.5, 4), ("1/2", 4), (0.25, 2), (0.125, 1), ("1/8", 1), ("2/8", 2), ("auto", None)],
)
def test_the_run_of_cells_that_a_share_is(share: object, cells: int | None) -> None:
    assert share_cells(share) == cells


@pytest.mark.parametrize(
    ("share", "nearest"),
    [
        ("1/3", 'write "1/4" (less), "1/2" (which holds it), or "auto"'),
        (0.3, 'write "1/4" (less), "1/2" (which holds it), or "auto"'),
        (0.51, 'write "1/2" (less), 1 (which holds it), or "auto"'),
        (0.01, 'write "1/8" (which holds it), or "auto"'),
    ],
)
def test_a_share_that_no_device_has_is_refused_with_the_nearest_ones(share: object, nearest: str) -> None:
    with pytest.raises(ValueError, match="not a share that a device has") as refused:
        share_cells(share)
    assert str(refused.value).endswith(nearest)
    assert '"1/8", "1/4", "1/2" and 1' in str(refused.value)


@pytest.mark.parametrize(
    "share",
    [
        0,
        -1,
        1.01,
        "1/0",
        "half",
        True,
        None,
        [1],
        float("nan"),
        float("inf"),
        1e308,
        10**400,
        "1e999999999",
        "1e-999999999",
        "1/00",
    ],
)
def test_what_is_no_share(share: object) -> None:
    with pytest.raises(ValueError, match="not a share"):
        share_cells(share)


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 150 << 20, 1 << 40)] == ["0 B", "1023 B", "1.5 KiB", "150 MiB", "1.0 TiB"]


def test_two_sizes_that_differ_never_read_the_same() -> None:
    gib = 1 << 30
    assert need_and_limit(3 * gib, 2 * gib) == ("3.0 GiB", "2.0 GiB")
    assert need_and_limit(gib, gib) == ("1.0 GiB", "1.0 GiB")
    assert need_and_limit(gib + 1, gib) == ("1073741825 bytes", "1073741824 bytes")


def test_how_often_is_said_in_words() -> None:
    assert [times(number) for number in (1, 2, 3)] == ["once", "twice", "3 times"]
