"""`enginehouse images`: what people read, and what programs do."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from compose.cli import images
from compose.cli.commands import enginehouse

IMAGE: dict[str, Any] = {
    "image": "img_1", "node": "n1", "configuration": "cfg_1", "models": ["a", "b"], "state": "stale", "outlook": "built anew",
    "pinned": True, "size_bytes": 3 << 30, "zero_bytes": 1 << 30, "made_ms": 1, "used_ms": 0, "uses": 2, "saved": [],
    "code": "driver_changed", "message": "the driver is 2, it was 1", "proof": "same_tokens",
}  # fmt: skip


class Plane:
    def get(self, *path: str) -> Any:
        match path:
            case ("api", "images"):
                return [IMAGE]
            case ("api", "nodes"):
                return [{"unsaved": ["ins_1 (a) is not on disk (no_space): it needs 2 GiB; there is 1 GiB"]}]
            case _:
                assert path == ("api", "images", "img_1")
                return IMAGE


@pytest.fixture(autouse=True)
def _plane(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def api(data: Path) -> Iterator[Plane]:
        yield Plane()

    monkeypatch.setattr(images, "api", api)


def inspected(tmp_path: Path, *options: str) -> str:
    result = CliRunner().invoke(enginehouse, ["--data", str(tmp_path), "images", "inspect", "img_1", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_an_image_is_inspected_in_lines_and_in_json_where_asked_for(tmp_path: Path) -> None:
    assert json.loads(inspected(tmp_path, "--json")) == IMAGE
    told = dict(line.split("  ", 1) for line in inspected(tmp_path).splitlines())
    shown = {name: text.strip() for name, text in told.items()}
    assert shown["state"] == "stale, pinned"
    assert shown["reason"] == "driver_changed: the driver is 2, it was 1; built anew"
    assert shown["size"] == "3.0 GiB on disk, and 1.0 GiB of zeros in memory"
    assert (shown["models"], shown["used"], shown["uses"]) == ("a, b", "never", "2")
    assert "saved to it" not in shown, "nothing is"


def test_the_list_says_which_engines_are_not_on_disk_and_why(tmp_path: Path) -> None:
    result = CliRunner().invoke(enginehouse, ["--data", str(tmp_path), "images"])
    assert result.output.splitlines()[-1] == "ins_1 (a) is not on disk (no_space): it needs 2 GiB; there is 1 GiB"
    plain = CliRunner().invoke(enginehouse, ["--data", str(tmp_path), "images", "list", "--json"])
    assert json.loads(plain.output) == [IMAGE]
