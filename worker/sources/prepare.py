"""From a model's spec to a directory that the pool can stage and a frontend can read, and to the facts about it."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from controlplane.arguments import shaping
from controlplane.spec import EngineName, ModelFacts, ModelSpec
from worker.engines.interface import OWN_LAYOUT
from worker.engines.pretence import CONTEXT_TOKENS
from worker.frontend.chat import load
from worker.frontend.request import Invalid
from worker.sources.copies import note
from worker.sources.fakes import WEIGHT_BYTES, fake_source
from worker.sources.identity import SourceRefused, identity, identity_of_draft
from worker.sources.places import converted, models, name_of
from worker.sources.report import Inspected, Line, Progress, Refused
from worker.versions import release

ProgressCall = Callable[[int, int], None]
"""Bytes done, bytes in all (0: unknown)."""
DEADLINE_S: Final = 4 * 3600.0
"""The largest models that a disk takes, over a slow line."""
TAIL_BYTES: Final = 2000
PAGE: Final = 4096
LIBRARIES: Final[dict[EngineName, tuple[tuple[str, ...], str]]] = {
    "transformers": (("torch", "transformers"), "cpu"),
    "vllm": (("vllm", "torch", "transformers"), "gpu"),
}
"""What an engine needs to be installed, and the extra that brings it."""
FAKE_NAME: Final = re.compile(r"^[\w.-]{0,100}$")


class Prepared(msgspec.Struct, frozen=True):
    source_dir: Path
    facts: ModelFacts
    draft_dir: Path | None = None
    """Of the model that drafts for it: a copy, named by its content, that nobody changes."""


async def prepare(spec: ModelSpec, data_dir: Path, progress: ProgressCall) -> Prepared:
    """Open the source of `spec`, fetched and converted if that has not been done.

    Raises:
        SourceRefused.
    """
    if spec.source.startswith("fake:") or spec.engine == "fake":
        return await asyncio.to_thread(_fake, spec, data_dir)
    libraries, extra = LIBRARIES[spec.engine]
    if missing := [name for name in libraries if find_spec(name) is None]:
        raise SourceRefused(
            "engine_missing",
            f"engine {spec.engine!r} needs {' and '.join(missing)}, which this machine doesn't have: "
            f"pip install 'enginehouse[{extra}]'",
            final=False,
        )
    marks = await asyncio.to_thread(identity, spec.source)
    dtype = str(spec.arguments.get("dtype", "float32"))
    own = ("own",) if spec.engine in OWN_LAYOUT else ()
    drafts = await asyncio.to_thread(identity_of_draft, spec)
    told = msgspec.json.encode(spec.arguments).decode()
    known = models(data_dir) / f"inspected-{name_of(*marks, *drafts, *own, told)}.json"
    inspected = await asyncio.to_thread(_remembered, known)
    if inspected is None:
        inspected = await _opened(spec, data_dir, converted(marks, dtype), progress)
        draft = known.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(inspected))
        draft.replace(known)
    try:
        facts = await asyncio.to_thread(_facts, spec, inspected)
        draft_dir = Path(inspected.draft_dir) if inspected.draft_dir else None
        if draft_dir is not None:
            note(models(data_dir), facts.configuration, draft_dir)
        return Prepared(Path(inspected.source_dir), facts, draft_dir)
    except ValueError as error:
        raise SourceRefused("bad_source", str(error)) from error


def _fake(spec: ModelSpec, data_dir: Path) -> Prepared:
    name = spec.source.removeprefix("fake:") or spec.name
    if spec.engine != "fake" or not spec.source.startswith("fake:") or not FAKE_NAME.match(name):
        raise SourceRefused("bad_source", f"source {spec.source!r} and engine {spec.engine!r} don't go together")
    weight_bytes = int(spec.arguments.get("weight_bytes", WEIGHT_BYTES))
    source = fake_source(data_dir, name, weight_bytes)
    shape = msgspec.json.encode(shaping("fake", spec.arguments), order="deterministic").decode() + ranks_of(spec)
    facts = ModelFacts(
        configuration=configuration("fake", "fake", shape), architecture="fake", weight_bytes=-(-weight_bytes // PAGE) * PAGE,
        kv_bytes=int(spec.arguments.get("kv_bytes", 0)), parameters=weight_bytes,
        context_tokens=int(spec.arguments.get("context_tokens", CONTEXT_TOKENS)),
        dtype="uint8", template_bytes=template_bytes(source), tokenizer="bytes",
    )  # fmt: skip
    return Prepared(source, facts)


def ranks_of(spec: ModelSpec) -> str:
    """What a skeleton's shape has to say of the devices it is cut over: nothing of one."""
    return f" on {spec.gpus} devices" if spec.gpus > 1 else ""


def configuration(engine: str, architecture: str, shape: str) -> str:
    """Return the id of all that makes a skeleton."""
    return f"cfg_{blake3(chr(0).join((engine, architecture, shape)).encode()).hexdigest(length=8)}"


def _facts(spec: ModelSpec, inspected: Inspected) -> ModelFacts:
    source = Path(inspected.source_dir)
    if spec.engine in OWN_LAYOUT:
        dtype = str(spec.arguments.get("dtype", "bfloat16"))
        arguments = shaping(spec.engine, spec.arguments)
        if inspected.draft_dir:
            arguments["draft_model"] = Path(inspected.draft_dir).name  # what is in it, wherever it was found
        told = msgspec.json.encode(arguments, order="deterministic").decode()
        shape = f"{told} {inspected.context_tokens} {release(spec.engine)}{ranks_of(spec)}"
    else:
        dtype = str(spec.arguments.get("dtype", "float32"))
        threads = spec.arguments.get("threads", "auto")
        shape = f"{dtype} {inspected.context_tokens} {inspected.max_num_seqs} {threads}{ranks_of(spec)}"
    return ModelFacts(
        configuration=configuration(spec.engine, inspected.skeleton, shape), architecture=inspected.architecture,
        weight_bytes=inspected.weight_bytes, kv_bytes=inspected.kv_bytes, context_tokens=inspected.context_tokens,
        parameters=inspected.parameters, dtype=dtype, template_bytes=template_bytes(source), tokenizer=tokenizer_digest(source),
    )  # fmt: skip


def template_bytes(source: Path) -> int:
    """Return how many bytes the chat template puts around one short message: more than the tokens that they become."""
    try:
        return len(load(source).render([{"role": "user", "content": ""}]).encode())
    except Invalid:
        return 0


def tokenizer_digest(source: Path) -> str:
    digest = blake3()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        with contextlib.suppress(FileNotFoundError):
            digest.update(name.encode() + (source / name).read_bytes())
    return f"tok_{digest.hexdigest(length=8)}"


def _remembered(file: Path) -> Inspected | None:
    try:
        inspected = msgspec.json.decode(file.read_bytes(), type=Inspected)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    there = [inspected.source_dir, *([inspected.draft_dir] if inspected.draft_dir else [])]
    return inspected if all(Path(one).is_dir() for one in there) else None


async def _opened(spec: ModelSpec, data_dir: Path, target: str, progress: ProgressCall) -> Inspected:
    """Have the source opened by a process of its own, and return its last line. Raises SourceRefused."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "worker.sources.opening", "--source", spec.source, "--models", str(models(data_dir)),
        "--target", target, "--arguments", msgspec.json.encode(spec.arguments).decode(), "--parent", str(os.getpid()),
        *(["--own-layout"] if spec.engine in OWN_LAYOUT else []),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    tail = asyncio.create_task(_tail(process.stderr))
    last: Line | None = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for raw in process.stdout:
                with contextlib.suppress(msgspec.DecodeError):  # a library that prints
                    last = msgspec.json.decode(raw, type=Line)
                    if isinstance(last, Progress):
                        progress(last.done_bytes, last.total_bytes)
            status = await process.wait()
    except TimeoutError:
        raise SourceRefused("opening_failed", f"opening {spec.source} took more than {DEADLINE_S:g} s", final=False) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        said = await tail
    match last:
        case Inspected():
            return last
        case Refused():
            raise SourceRefused(last.code, last.message, final=last.final)
        case _:
            raise SourceRefused("opening_failed", f"opening {spec.source} ended with {status}: {_last_line(said)}", final=False)


def _last_line(text: str) -> str:
    """Of a traceback: the error."""
    return next((line.strip()[:500] for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while part := await stream.read(4096):
        kept = (kept + part)[-TAIL_BYTES:]
    return kept.decode("utf-8", "replace").strip()
