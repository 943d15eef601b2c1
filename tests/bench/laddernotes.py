"""What is seen of an engine's process from outside, and what is noted of it."""

import os
import time
from pathlib import Path
from typing import Any

from worker.images import records

LARGE = 2 << 20


def ms(begun: float) -> float:
    return round((time.monotonic() - begun) * 1000, 1)


def spoken(said: Any) -> dict[str, float]:
    return {f"{one.verb}_ms": one.took_ms for one in said}


def nvidia_files(pid: int) -> dict[str, int]:
    return {name: count for name, count in open_files(pid).items() if "nvidia" in name}


def open_files(pid: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = "".join(letter for letter in os.readlink(entry) if not letter.isdigit())
        except OSError:
            continue
        found[name] = found.get(name, 0) + 1
    return found


def left_over(work: Path) -> list[str]:
    """Command lines of processes that were started from this directory's engines or holders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if str(work) in line and ("worker.holder" in line or "worker.engines" in line):
                found.append(line[:200])
    return found


def kinds(pid: int) -> dict[str, dict[str, int]]:
    """A process's memory by kind of mapping: how many mappings, private bytes that are there, bytes of them in large pages."""
    found: dict[str, dict[str, int]] = {}
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            start, end = (int(word, 16) for word in fields[0].split("-"))
            name = fields[5] if len(fields) > 5 else ""
            kind = "libraries" if name.endswith(".so") or ".so." in name else "files" if name.startswith("/") else name
            kind = kind or ("anonymous, >= 1 MiB" if end - start >= 1 << 20 else "anonymous, smaller")
            if fields[1].endswith("s"):
                kind = f"shared, {name or end - start}"
            found.setdefault(kind, {"mappings": 0, "bytes": 0, "large": 0})["mappings"] += 1
        elif fields[0] == "Anonymous:":
            found[kind]["bytes"] += int(fields[1]) << 10
        elif fields[0] == "AnonHugePages:":
            found[kind]["large"] += int(fields[1]) << 10
    return found


def mappings(pid: int) -> dict[str, int]:
    """Bytes that are there, by the place of each mapping."""
    found, place = dict[str, int](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            place = fields[0]
        elif fields[0] == "Rss:":
            found[place] = int(fields[1]) << 10
    return found


def contents(directory: Path, pid: int) -> dict[str, Any]:
    """What a dump holds of a process: bytes by kind of mapping, in whole large pages, of zeros."""
    _, (mm,) = records.read(directory / f"mm-{pid}.img")
    areas = [records.numbers(one) for one in records.messages(mm, 14)]
    _, (first, *entries) = records.read(directory / f"pagemap-{pid}.img")
    found: dict[str, Any] = {"mappings": len(areas), "entries": len(entries), "whole_large_pages": 0}
    at = run_start = run_end = 0
    for entry in map(records.numbers, entries):
        start, end = entry[1], entry[1] + 4096 * entry.get(5, entry[2])
        while start < end:
            while areas[at][2] <= start:
                at += 1
            until, status, flags = min(end, areas[at][2]), areas[at][7], areas[at][6]
            size = areas[at][2] - areas[at][1]
            kind = (
                "heap" if status & 1 << 5 else "of files" if status & 1 << 6 else "stack" if status & 1 << 1
                else f"anonymous, {'>= 64 MiB' if size >= 64 << 20 else '>= 1 MiB' if size >= 1 << 20 else 'smaller'}"
                if status & 1 << 9 else f"status {status:#x}"
            ) + ("" if flags & ~0x4000 in (0x22, 0x02) else f", flags {flags:#x}")  # fmt: skip
            found[kind] = found.get(kind, 0) + until - start
            if start != run_end:
                run_start = start
            before = max(0, run_end // LARGE - -(-run_start // LARGE)) if start == run_end else 0
            run_end = until
            found["whole_large_pages"] += (max(0, run_end // LARGE - -(-run_start // LARGE)) - before) * LARGE
            start = until
    pages = directory / f"pages-{records.numbers(first)[1]}.img"
    zeros, nothing = 0, bytes(4096)
    with pages.open("rb") as file:
        while piece := file.read(1 << 22):
            zeros += sum(piece[at : at + 4096] == nothing for at in range(0, len(piece), 4096))
    others = {path.name: path.stat().st_size for path in directory.iterdir() if path != pages and path.stat().st_size > 1 << 20}
    return found | {"zero_bytes": zeros * 4096, "other_files": others}
