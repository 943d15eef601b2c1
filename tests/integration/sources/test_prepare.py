"""From a spec to a directory that can be staged, and facts that can be trusted."""

import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from controlplane.spec import ModelSpec
from pool.safetensors import read_source
from tests.tinymodels import tiny
from worker.frontend.chat import load
from worker.sources import SourceRefused, prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"
pytestmark = pytest.mark.timeout(400)  # each source is opened by a process of its own, which imports torch


def spec(source: object, **arguments: Any) -> ModelSpec:
    return ModelSpec(name="m", source=str(source), arguments=arguments)


def silent(done: int, total: int) -> None:
    assert 0 <= done <= total


async def refused(model: ModelSpec, data: Path) -> SourceRefused:
    with pytest.raises(SourceRefused) as caught:
        await prepare(model, data, silent)
    return caught.value


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def test_a_directory_that_fits_is_used_as_it_is(tmp_path: Path, data: Path) -> None:
    source = tiny(tmp_path / "a")
    prepared = await prepare(spec(source, max_num_seqs=3), data, silent)
    facts = prepared.facts
    stored = sum(entry.size_bytes for entry in read_source(str(source)).entries)
    assert prepared.source_dir == source
    assert (facts.architecture, facts.dtype, facts.context_tokens) == ("LlamaForCausalLM", "float32", 256)
    assert (facts.weight_bytes, facts.parameters * 4) == (stored, stored)
    assert facts.kv_bytes == 3 * 256 * 2 * 2 * 2 * 8 * 4
    assert facts.template_bytes == len("user: \nassistant: ")
    assert facts.tokenizer.startswith("tok_")
    sibling = await prepare(spec(tiny(tmp_path / "b", seed=1), max_num_seqs=3), data, silent)
    assert sibling.facts.configuration == facts.configuration, "other weights, same skeleton"
    fewer = await prepare(spec(source, max_num_seqs=2), data, silent)
    assert fewer.facts.configuration != facts.configuration


async def test_another_dtype_is_converted_once(tmp_path: Path, data: Path) -> None:
    source = tiny(tmp_path / "a")
    told: list[tuple[int, int]] = []
    first = await prepare(spec(source, dtype="bfloat16"), data, lambda done, total: told.append((done, total)))
    assert first.source_dir.parent == data / "models"
    assert {entry.dtype for entry in read_source(str(first.source_dir)).entries} == {"BF16"}
    assert told[-1][0] == told[-1][1] > 0
    assert load(first.source_dir).stop_ids == (256,)
    written = (first.source_dir / "model.safetensors").stat()
    again = await prepare(spec(source, dtype="bfloat16", max_num_seqs=1), data, silent)
    assert again.source_dir == first.source_dir
    assert (again.source_dir / "model.safetensors").stat().st_ino == written.st_ino
    assert again.facts.weight_bytes * 2 == (await prepare(spec(source), data, silent)).facts.weight_bytes


async def test_what_can_not_be_used_says_why(tmp_path: Path, data: Path) -> None:
    assert "absolute" in (await refused(spec("models/x"), data)).message
    assert (await refused(spec(tmp_path / "nowhere"), data)).code == "bad_source"
    outside = tiny(tmp_path / "outside")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in outside.iterdir():
        (linked / file.name).symlink_to(file)
    assert "leads out" in (await refused(spec(linked), data)).message
    assert (
        "max_model_len is 999; the model's own limit is 256" in (await refused(spec(outside, max_model_len=999), data)).message
    )
    silent_one = tiny(tmp_path / "silent")
    for file in silent_one.glob("token*"):
        file.unlink()
    assert "has no tokenizer" in (await refused(spec(silent_one), data)).message
    (silent_one / "config.json").unlink()
    assert (await refused(spec(silent_one), data)).message == f"{silent_one} holds no model: it has no config.json"
    config = json.loads((outside / "config.json").read_text())
    (outside / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}, "hidden_size": 64})
    )
    gptq = await refused(spec(outside), data)
    assert (gptq.code, gptq.final) == ("bad_source", True)
    assert "gptq" in gptq.message
    (outside / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    missing = await refused(spec(outside), data)
    assert "weights are missing" in missing.message
    assert [path.name for path in (data / "models").iterdir() if path.is_dir()] == []


async def test_fake_models_share_a_skeleton_and_not_their_bytes(data: Path) -> None:
    one, two = [
        await prepare(
            ModelSpec(name=name, source=f"fake:{name}", engine="fake", arguments={"weight_bytes": 5000}), data, silent
        )
        for name in ("one", "two")
    ]
    assert one.facts.configuration == two.facts.configuration
    assert one.facts.weight_bytes == 8192
    assert (one.source_dir / "model.safetensors").read_bytes() != (two.source_dir / "model.safetensors").read_bytes()
    assert sum(entry.size_bytes for entry in read_source(str(one.source_dir)).entries) == 5000
    wrong = await refused(ModelSpec(name="x", source="fake:../x", engine="fake"), data)
    assert wrong.code == "bad_source"


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, bytes]]:
    """A hub of our own with one model; changing the files after they were listed is a broken download."""
    files = {file.name: file.read_bytes() for file in tiny(tmp_path / "hubmodel").iterdir()}
    files["pytorch_model.bin"] = b"a pickle"
    listed = dict(files)

    async def info(_: web.Request) -> web.Response:
        siblings = []
        for name, body in listed.items():
            lfs = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1}
            siblings.append({"rfilename": name, "size": len(body), "lfs": lfs})
        about = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        return web.json_response(about)

    async def file(request: web.Request) -> web.Response:
        body = files[request.match_info["file"]]
        etag = hashlib.sha256(listed[request.match_info["file"]]).hexdigest()
        return web.Response(body=body, headers={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    app = web.Application()
    app.add_routes(
        [
            web.get(f"/api/models/org/name/revision/{COMMIT}", info),
            web.get(f"/org/name/resolve/{COMMIT}/{{file}}", file),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield files
    await runner.cleanup()


async def test_a_pinned_model_is_fetched_and_compared(hub: dict[str, bytes], data: Path) -> None:
    prepared = await prepare(spec(f"hf:org/name@{COMMIT}"), data, silent)
    names = {path.name for path in prepared.source_dir.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "pytorch_model.bin" not in names
    hub.clear()
    assert (await prepare(spec(f"hf:org/name@{COMMIT}", max_num_seqs=1), data, silent)).source_dir == prepared.source_dir


async def test_a_broken_download_is_noticed_and_left_nowhere(hub: dict[str, bytes], data: Path) -> None:
    weights = bytearray(hub["model.safetensors"])
    weights[-1] ^= 1
    hub["model.safetensors"] = bytes(weights)
    broken = await refused(spec(f"hf:org/name@{COMMIT}"), data)
    assert (broken.code, broken.final) == ("corrupt", False)
    assert "sha256" in broken.message
    assert list((data / "models").iterdir()) == []


async def test_a_hub_that_does_not_answer_can_be_tried_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    away = await refused(spec(f"hf:org/name@{COMMIT}"), data)
    assert (away.code, away.final) == ("hub_unreachable", False)
    assert (await refused(spec("hf:org/name@main"), data)).code == "bad_source"


async def test_an_opening_that_is_cancelled_ends_its_process(tmp_path: Path, data: Path) -> None:
    opening = asyncio.create_task(prepare(spec(tiny(tmp_path / "a")), data, silent))
    found: list[str] = []
    async with asyncio.timeout(60):
        while not found:
            await asyncio.sleep(0.01)
            found = _openings(data)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert _openings(data) == []


async def test_an_opening_whose_worker_died_while_it_imported_opens_nothing(data: Path) -> None:
    opening = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "worker.sources.opening", "--source", "/nowhere", "--models", str(data), "--target", "t",
        "--parent", str(1 << 23), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert (await opening.communicate())[0] == b""
    assert opening.returncode == 1


def _openings(data: Path) -> list[str]:
    commands = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                commands[directory.name] = (directory / "cmdline").read_bytes()
            except OSError:
                continue
    return [pid for pid, command in commands.items() if b"worker.sources.opening" in command and str(data).encode() in command]


async def test_a_source_that_engines_could_not_see_is_refused(data: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
        (Path(there) / "config.json").write_text("{}")
        assert "engines have one of their own" in (await refused(spec(Path(there)), data)).message
