"""The API against its own schema: whatever is sent, no crash and nothing that the schema doesn't announce."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.integration.web.house import House

EXPECTED = 'checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503", "504"]'
"""Typed answers, not crashes: the plane can't now, and the view is not that far."""


# No --max-time: it cuts the coverage phase after half of it, and has the fuzzing repeat itself until the rest is spent.
@pytest.mark.timeout(400)  # ten seconds of two cores for itself
async def test_no_input_crashes_the_api(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.rest.asking.AFTER_S", 0.05)
    (tmp_path / "schemathesis.toml").write_text(EXPECTED)
    await house.register("alpha")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", f"{house.url}/api/schema/openapi.json", "--url", house.url,
        "--header", f"Authorization: Bearer {house.token}", "--phases", "examples,coverage,fuzzing", "--max-examples", "5",
        "--checks", "not_a_server_error,content_type_conformance,response_headers_conformance,response_schema_conformance",
        "--exclude-path", "/api/events/follow", "--exclude-path-regex", "^/(readyz|livez)", "--generation-deterministic",
        "--no-color", "--warnings", "off", "--request-timeout", "40",
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    print(output.decode()[-9000:])
    assert process.returncode == 0, output.decode()[-6000:]
