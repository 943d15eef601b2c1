"""What is written about a model into the settings of a plane whose GPUs are played."""

from pathlib import Path

POOL = '[node]\npool_bytes = "256MiB"\n'


def vllm(name: str, source: Path, share: str = '"1/2"', *, more: str = "") -> str:
    """A `[[model]]` table of a tiny model that leaves its GPUs only when it is told to. `share`, and `more` behind its
    arguments, as they stand in TOML."""
    return (
        f'\n[[model]]\nname = "{name}"\nsource = "{source}"\nengine = "vllm"\nshare = {share}\n'
        f'idle = {{ sleep = "never", cold = "never" }}\narguments = {{ max_model_len = 256, kv_bytes = "16MiB"{more} }}\n'
    )
