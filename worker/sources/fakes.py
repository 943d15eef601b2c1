"""Models of the fake engine: small, but real files that become real pool memory."""

import json
import struct
from pathlib import Path
from typing import Final

from blake3 import blake3

from worker.engines.pretence import IDENTITY
from worker.frontend.chat import FAKE
from worker.sources.places import made, models, pretended

WEIGHT_BYTES: Final = 2**20
_BLOCK: Final = 2**20


def fake_source(data: Path, name: str, weight_bytes: int) -> Path:
    """Return the directory of fake model `name`, made if it is not there. Its bytes follow from its name."""
    target = models(data) / pretended(name, weight_bytes)
    if not target.exists():
        with made(target) as draft:
            (draft / FAKE).write_text(json.dumps({"name": name}))
            _write(draft / "model.safetensors", name, weight_bytes)
    return target


def _write(file: Path, name: str, weight_bytes: int) -> None:
    identity = blake3(name.encode()).digest(length=16)
    rest = max(0, weight_bytes - len(identity))
    header = {IDENTITY: {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}
    if rest:
        header["fake.weights"] = {"dtype": "U8", "shape": [rest], "data_offsets": [16, 16 + rest]}
    described = json.dumps(header).encode()
    block = blake3(name.encode()).digest(length=_BLOCK)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(described)) + described + identity)
        for at in range(0, rest, _BLOCK):
            out.write(block[: rest - at])
