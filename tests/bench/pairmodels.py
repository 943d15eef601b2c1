"""Models for a bench of a plane on two GPUs: one goes over both, one fits on half of one, one wants a whole one."""

import os
from pathlib import Path

from worker.agent import DEADLINES

MODELS = {"pair": "{ gpus = 2 }", "solo": '"1/2"', "whole": '"1"'}
"""Name -> share."""
PLAYED = tuple(f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in (1, 2))

_DEADLINES = {DEADLINES: '{"attach": 12}'}
"""A rank that never answers is waited for as long; what is pinned as it is copied wants some of it."""


def settings(work: Path, shape: str, *, standin: bool) -> tuple[str, dict[str, str], Path | None]:
    """The text; the environment of the plane; where the machine is played, if it is."""
    if standin:
        from tests.standin.install import install
        from tests.tinymodels import tiny

        machine = work / f"machine-{os.getpid()}"
        sources = {
            "pair": tiny(machine / "sources" / "pair", "llama", 1),
            "solo": tiny(machine / "sources" / "solo", "qwen3", 2),
            "whole": tiny(machine / "sources" / "whole", "llama", 3),
        }
        environment = {**install(machine, dict.fromkeys(PLAYED, 128 << 20)), **_DEADLINES}
        return _text(sources, "256MiB", "16MiB", "16MiB", 256), environment, machine
    from tests.bench.planemodels import made_together

    sources = made_together(work, {"pair": ("tiny", 1), "solo": (shape, 2), "whole": ("tiny", 3)})
    return _text(sources, "8GiB", "2GiB", "4GiB", 1024), _DEADLINES, None


def _text(sources: dict[str, Path], pool: str, pair_kv: str, solo_kv: str, context: int) -> str:
    kv = {"pair": pair_kv, "solo": solo_kv, "whole": pair_kv}
    models = [
        f'[[model]]\nname = "{name}"\nsource = "{sources[name]}"\nengine = "vllm"\nshare = {share}\n'
        'idle = { sleep = "never", cold = "never" }\n'
        f'arguments = {{ kv_bytes = "{kv[name]}", max_model_len = {context}, max_num_seqs = 16, prefix_caching = false'
        f"{', gang_checkpoint = true' if name == 'pair' else ''} }}\n"
        for name, share in MODELS.items()
    ]
    return f'[node]\npool_bytes = "{pool}"\n\n' + "\n".join(models)
