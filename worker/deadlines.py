"""How long each step may take, and why. Beyond it the step has failed: nothing waits for ever."""

from typing import Final

from msgspec import Struct

from worker.moves import StepName


class Deadlines(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. The environment may carry others (`agent.DEADLINES`)."""

    prepare: float = 3600.0
    """A first fetch over a slow line; it can be abandoned at any moment, and shows its progress."""
    stage: float = 900.0
    """60 GiB from a disk that gives 100 MB/s is ten minutes."""
    deposit: float = 900.0
    """Likewise, and from the GPU into memory that is new: 15 GB took 5 to 8 s."""
    start_holder: float = 20.0
    """A small Python process: 0.2 s, or ten times ten that on two busy cores."""
    start_engine: float = 10.0
    """The fork alone."""
    restore: float = 60.0
    """CRIU, 1.5 s for 2.2 GB, and beside it the comparison with its digests. Beyond it there is the cold start."""
    checkpoint: float = 30.0
    """Parked in a third of a second, or some seconds where ranks let go of one another; lock 1 ms, checkpoint 0.8-1.9 s for a
    slept vLLM engine, 0.5 s more a GB."""
    cuda_restore: float = 30.0
    """0.45 s for such an engine; the driver's own start before it takes some seconds on a machine with eight GPUs, and a gang's
    communicators behind it likewise."""
    fill: float = 60.0
    """60 GiB take 1.2 s by a link of their own, 8 s unpinned; other copies go first."""
    seek: float = 10.0
    build: float = 180.0
    """A dump, a restore and one answer: some seconds, on a slow disk some tens."""
    connect: float = 300.0
    """Imports and the skeleton: torch takes 5-20 s here, vLLM 33-86 s from cold, and longer with compilation."""
    start_frontend: float = 60.0
    """Imports tokenizers: a second or two on a quiet machine."""
    take_cells: float = 10.0
    """The cells' last holder ended before they were granted; the kernel may still be giving its memory back."""
    attach: float = 60.0
    """A set that was brought a moment ago is pinned as it is copied: 5.7 GB/s instead of 54."""
    wake: float = 60.0
    """KV memory in some 10 ms; a gang that comes from `checkpoint` captures its graphs, as at its start: some seconds."""
    check: float = 60.0
    """Eight tokens, the first ones of a cold process."""
    serve: float = 20.0
    """The frontend loads the model's tokenizer."""
    stop_serving: float = 10.0
    drain: float = 30.0
    """What runs may end by itself for this long; then it is aborted."""
    abort: float = 5.0
    """From the abort of the rest to an engine without requests."""
    sleep: float = 60.0
    detach: float = 30.0
    verify: float = 10.0
    """Memory that is given back late (seconds on a GPU) is waited for."""
    drop_cells: float = 5.0
    end_engine: float = 5.0
    """Asked to shut down, then SIGTERM for as long, then SIGKILL."""
    clear: float = 30.0
    """Each process's own deadlines are within it."""
    pulse: float = 3.0
    """Between two questions to an engine, and to a frontend, that nobody has told anything."""
    hung: float = 20.0
    """Such a question's answer. An engine reads it between two of its steps; one over a long prompt takes seconds on a CPU."""
    pool: float = 60.0
    """How long a climb waits for a pool daemon that is away, or for room that a dismissed set still takes."""

    def of(self, step: StepName) -> float:
        seconds: float = getattr(self, step.value)
        if step is StepName.DRAIN:
            return seconds + 2 * self.abort  # the abort follows within the same step
        return seconds * 3 if step is StepName.END_ENGINE else seconds


DEFAULT: Final = Deadlines()
