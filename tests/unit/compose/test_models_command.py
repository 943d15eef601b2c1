"""`enginehouse models`: what is wrong with what a person gave is said, not raised."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from compose.cli.commands import enginehouse


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_wrong_usage(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.toml"
    file.write_bytes(content)
    result = CliRunner().invoke(enginehouse, ["--data", str(tmp_path), "models", "add", "--file", str(file)])
    assert result.exit_code == 2
    assert "is not TOML" in result.output
