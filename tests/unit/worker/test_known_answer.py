"""What an engine answered before is compared with what it answers now, and what is left of that record with nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker import knownanswer
from worker.engines.messages import Checked
from worker.failure import StepFailed


def answering(data: Path, *ids: int) -> Any:
    """An instance whose engine says this."""

    async def ask(*_: object) -> Checked:
        return Checked(ids=ids)

    return SimpleNamespace(
        ask=ask, site=SimpleNamespace(data=data, deadlines=SimpleNamespace(check=1.0)), seen=SimpleNamespace(attached="ws_1"),
        record=SimpleNamespace(configuration="cfg_1", checked_sets=()), note=lambda **_: None,
        directory=SimpleNamespace(edit=lambda **_: None),
    )  # fmt: skip


async def test_the_first_answer_is_kept_and_another_one_refused(tmp_path: Path) -> None:
    assert await knownanswer.check(answering(tmp_path, 1, 2)) == "recorded"
    assert await knownanswer.check(answering(tmp_path, 1, 2)) == "same_tokens"
    with pytest.raises(StepFailed) as failed:
        await knownanswer.check(answering(tmp_path, 1, 3))
    assert failed.value.code == "check_mismatch"


@pytest.mark.parametrize("left", [b"", b"\0" * 64, b'{"cfg_1": [1'])
async def test_what_a_power_cut_left_of_a_record_is_no_record(tmp_path: Path, left: bytes) -> None:
    """Else its model would never come up again."""
    await knownanswer.check(answering(tmp_path, 1, 2))
    (file,) = (tmp_path / "models" / "known").iterdir()
    file.write_bytes(left)
    assert await knownanswer.check(answering(tmp_path, 1, 2)) == "recorded"
    assert await knownanswer.check(answering(tmp_path, 1, 2)) == "same_tokens"
