"""A ladder's figures as tables, and the goals that they are measured by."""

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.table import Table

from compose.bench.rows import Row

CPU_SAVED_MS, GPU_SAVED_MS, GPU_SAVE_MS = 2000, 2600, 6000
OVER_RESTORES_MS, OVER_COPY_MS, COPY = 600, 300, 1.08
TIMES_FASTER: Final = 10
IMAGE_BYTES: Final = 3 << 30


def show(rows: Row) -> None:
    console = Console(width=160, highlight=False, markup=False)
    versions = ", ".join(f"{name} {rows[name]}" for name in ("vllm", "torch", "transformers", "driver", "criu") if rows[name])
    console.print(f"{rows['shape']}, engine {rows['engine']}: {versions}; kernel {rows['kernel']}; {rows['date']}")
    table = Table("way", "median", "least", "most", "n", box=None, pad_edge=False, header_style="bold")
    for way, of in rows["ways"].items():
        table.add_row(way, *_times(of))
    console.print(table)
    table = Table("step, by the worker", "median", "least", "most", "n", box=None, pad_edge=False, header_style="bold")
    for way, steps in rows["steps_ms"].items():
        table.add_row(way)
        for step, of in steps.items():
            table.add_row(f"{'    ' if '.' in step else '  '}{step}", *_times(of))  # what a step was made of stands below it
    console.print(table)
    for operation, why in rows["skipped"].items():
        console.print(f"{operation}: not possible here: {why}")
    table = Table("figure", "goal", "measured", box=None, pad_edge=False, header_style="bold")
    for row in figures(rows):
        table.add_row(*row)
    console.print(table)
    console.print(f"answers the same everywhere: {'yes' if rows['same_answers'] else 'NO'}")


def figures(rows: Row) -> Iterator[tuple[str, str, str]]:
    """Figure, goal, measured."""
    ways, on_gpu = rows["ways"], rows["engine"] == "vllm"
    saved, cold = ways.get("saved -> first answer"), ways.get("cold, warmest -> first answer")
    if saved is not None:
        goal = GPU_SAVED_MS if on_gpu else CPU_SAVED_MS
        yield "saved -> first answer", f"<= {goal} ms", f"{saved['median_ms']:.0f} ms"
        if restores := _steps(rows, "saved -> first answer", "restore", "cuda_restore"):
            least = sum(restores)
            goal_text = f"<= CRIU {restores[0]:.0f} + CUDA {restores[1]:.0f} + {OVER_RESTORES_MS} ms"
            yield "likewise, over its restores", goal_text, f"+ {saved['median_ms'] - least:.0f} ms"
        if cold is not None:
            times = cold["least_ms"] / saved["median_ms"]
            yield "warmest cold start, times as long", f">= {TIMES_FASTER}" if on_gpu else "(stated)", f"{times:.1f}"
        again = ways.get("saved, right after the build -> first answer")
        if again is not None:
            yield "the first restore of the image", "(as fast)", f"{again['median_ms']:.0f} ms"
    if (down := ways.get("up -> saved, its image built and proved")) is not None:
        yield "up -> saved, built and proved", f"<= {GPU_SAVE_MS} ms" if on_gpu else "(stated)", f"{down['median_ms']:.0f} ms"
    if rows["image"]:
        size = rows["image"]["bytes"]
        yield "image", f"<= {IMAGE_BYTES} bytes" if on_gpu else "(stated)", f"{size} bytes"
        yield "processes of it when saved", "0", str(rows["image"]["processes_left_when_saved"])
    if (point := ways.get("checkpoint -> first answer")) is not None:
        goal_text = "(stated)"
        if parts := _steps(rows, "checkpoint -> first answer", "cuda_restore", "fill"):
            goal_text = f"<= CUDA {parts[0]:.0f} + {COPY} x copy {parts[1]:.0f} + {OVER_COPY_MS} = "
            goal_text += f"{parts[0] + COPY * parts[1] + OVER_COPY_MS:.0f} ms"
        yield "checkpoint -> first answer", goal_text, f"{point['median_ms']:.0f} ms"
    if rows["host_bytes"]:
        yield "memory of the host at checkpoint", "(stated)", f"{rows['host_bytes']} bytes"


def _steps(rows: Row, way: str, *names: str) -> list[float]:
    """Medians of these steps, in milliseconds; none unless there are all."""
    steps = rows["steps_ms"].get(way, {})
    return [steps[name]["median_ms"] for name in names] if all(name in steps for name in names) else []


def _times(of: Row) -> tuple[str, str, str, str]:
    return f"{of['median_ms']:.1f} ms", f"{of['least_ms']:.1f}", f"{of['most_ms']:.1f}", str(of["n"])
