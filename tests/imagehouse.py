"""A plant whose engines go to disk with a real CRIU, and what tests of that have in common."""

from pathlib import Path

import msgspec
import pytest

from controlplane.commands import Save
from controlplane.fleet import Instance
from controlplane.rungs import Rung
from tests.workshop import Plant
from worker.images.manifest import Manifest

SCRIPTED = """#!/bin/sh
# The real CRIU, but what the test says about one of its verbs.
real={real}
if [ -f {flag} ] && [ "$1" = "$(head -1 {flag})" ]; then eval "$(tail -n +2 {flag})"; fi
exec $real "$@"
"""


def able(made: Plant) -> Plant:
    if hindrance := made.worker.images.hindrance:
        pytest.skip(f"engines can't be saved here: {hindrance}")
    return made


class Surgeon:
    """Stands before the plant's CRIU: `do` says what a verb does from now on."""

    def __init__(self, made: Plant) -> None:
        self._flag = made.data / "criu" / "flag"

    def do(self, verb: str, script: str) -> None:
        """`$real` is the real one's path; what the script does not end goes on to it."""
        self._flag.write_text(f"{verb}\n{script}\n")

    def well(self) -> None:
        self._flag.unlink()


async def save(plane: Plant, name: str) -> Instance:
    """Take a model's instance to disk; nothing of its processes is left."""
    instance = await save_one(plane, name)
    assert plane.processes() == []
    assert list((plane.data / "run" / "inst").iterdir()) == []
    return instance


async def save_one(plane: Plant, name: str) -> Instance:
    """As `save`, with others about."""
    plane.order(Save(model=name))
    instance = next(i for i in plane.fleet.instances.values() if i.model == name)
    await plane.until(lambda: plane.fleet.instances[instance.instance].rung is Rung.SAVED)
    return plane.fleet.instances[instance.instance]


async def says(plane: Plant, instance: Instance, text: str) -> str:
    lines = await plane.generate(instance, f"req_{len(plane.events)}_{len(text)}_{instance.instance}", text)
    return "".join(line.get("text", "") for line in lines)


def manifest(plane: Plant) -> tuple[Path, Manifest]:
    (path,) = (plane.data / "images").iterdir()
    return path, msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)


def flip(path: Path) -> None:
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 1]))
