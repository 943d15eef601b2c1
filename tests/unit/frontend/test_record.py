"""The record of a request: whatever a death cuts off, the rest is read again, and the text follows from it."""

import errno
import os
from pathlib import Path

import pytest

from worker.engines.messages import Sampling
from worker.frontend.chat import ByteText
from worker.frontend.inflight import Inflight
from worker.frontend.record import Closed, Opened, Record, replay


def opened(request: str = "req_1", stops: tuple[str, ...] = ()) -> Opened:
    return Opened(
        request=request, attempt=1, model="m", grant=1, source="/s", prompt=(1,), sampling=Sampling(max_tokens=9), stops=stops
    )


def again(directory: Path) -> Inflight:
    ((record, found),) = replay(directory)
    inflight = Inflight(found.opened, record, ByteText())
    inflight.replay(found.ids)
    if found.closed is not None:
        inflight.close(found.closed)
    return inflight


@pytest.mark.parametrize(("parts", "text", "ended"), [
    ((b"END", b"LESS list"), "ENDLESS list", None),
    ((b"END-OF", b"-ROW"), "", "stop"),
    (("👩🏽‍🚀 ไทย".encode(),), "👩🏽‍🚀 ไทย", None),
])  # fmt: skip
def test_a_frontend_may_die_after_any_token(
    tmp_path: Path, parts: tuple[bytes, ...] | bytes, text: str, ended: str | None
) -> None:
    """Within a stop string as within a character (C31)."""
    ids = b"".join(parts) if isinstance(parts, tuple) else parts
    for death in range(len(ids) + 1):
        directory = tmp_path / str(death)
        directory.mkdir()
        first = Inflight(opened(stops=("END-OF-ROW",)), Record.create(directory, opened(stops=("END-OF-ROW",))), ByteText())
        for at in range(death):
            assert first.take(at, (ids[at],))
        shown = first.text
        first.record.close()
        second = again(directory)
        assert second.text == shown
        assert second.take(0, tuple(ids)), "the engine sends again what was not acknowledged"
        assert second.text.startswith(shown)
        second.close(Closed(reason="length"))
        assert second.text == text
        assert second.closed is not None
        assert second.closed.reason == (ended or "length")
        second.record.remove()
        assert list(directory.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_no_more_costs_the_record_and_not_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as disk:
        disk.setattr(os, "open", full)
        inflight = Inflight(opened(), Record.create(tmp_path, opened()), ByteText())
    assert inflight.take(0, tuple(b"goes on"))
    assert inflight.text == "goes on"
    assert list(tmp_path.iterdir()) == []


def test_a_frame_cut_anywhere_is_cut_off(tmp_path: Path) -> None:
    directory = tmp_path / "record"
    directory.mkdir()
    first = Inflight(opened(), Record.create(directory, opened()), ByteText())
    start = (directory / "req_1_1").stat().st_size
    first.take(0, tuple(b"hello"))
    first.close(Closed(reason="stop"))
    first.record.close()
    whole = (directory / "req_1_1").read_bytes()
    for length in range(len(whole)):
        (directory / "req_1_1").write_bytes(whole[:length])
        found = list(replay(directory))
        assert len(found) == (length >= start)
        for record, replayed in found:
            assert bytes(replayed.ids) in (b"", b"hello")
            assert replayed.closed is None
            record.append(Closed(reason="length"))
            record.close()
            assert again(directory).closed == Closed(reason="length")


def test_tokens_that_are_missing_in_between_are_noticed(tmp_path: Path) -> None:
    inflight = Inflight(opened(), Record.create(tmp_path, opened()), ByteText())
    assert inflight.take(0, (104, 105))
    assert not inflight.take(3, (33,))
    assert inflight.take(1, (105, 33))
    assert (inflight.text, inflight.received) == ("hi!", 3)
    inflight.record.remove()


def test_tokens_past_a_stop_string_are_dropped_and_not_counted(tmp_path: Path) -> None:
    inflight = Inflight(opened(stops=("!",)), Record.create(tmp_path, opened()), ByteText())
    inflight.take(0, tuple(b"hi! there"))
    assert (inflight.text, inflight.counted, inflight.received) == ("hi", 3, 9)
    inflight.record.remove()


@pytest.mark.parametrize("name", ["../x", "", "a/b", "x" * 200])
def test_a_request_id_is_a_name_and_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no request id"):
        Record.create(tmp_path, opened(name))


def test_a_full_disk_costs_the_record_and_not_the_request(tmp_path: Path) -> None:
    record = Record.create(tmp_path, opened())
    os.dup2(full := os.open("/dev/full", os.O_WRONLY), record._fd)
    os.close(full)
    inflight = Inflight(opened(), record, ByteText())
    for at, byte in enumerate(b"on and on"):
        assert inflight.take(at, (byte,))
    inflight.close(Closed(reason="stop"))
    assert inflight.text == "on and on"
    assert list(replay(tmp_path)) == [], "half a record would be taken for a whole one"
