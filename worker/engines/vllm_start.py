"""How a vLLM is brought up: with which configuration, and where it keeps what it compiles."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from worker import gpus
from worker.engines.artefacts import Artefacts, environment, facts


@contextlib.contextmanager
def kept(root: Path | None, source: Path, arguments: dict[str, Any], devices: list[str]) -> Iterator[None]:
    """Within, every library that compiles keeps and finds its work below `root`."""
    if root is None:
        yield
        return
    known = facts("vllm", source, arguments, gpus.driver_version(), [gpus.architecture(one) for one in devices])
    with Artefacts(root).starting(known.fingerprint) as place:
        os.environ.update(environment(place))
        yield


def configured(engine_arguments: Any, chosen: dict[str, Any]) -> Any:
    """vLLM's configuration, its sleeps ours. Raises SystemExit for a version that is not supported."""
    import vllm  # noqa: PLC0415 - the environment counts when it is imported
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

    from pool.vllm_backend import NAME  # noqa: PLC0415
    from pool.vllm_version import BELOW, OLDEST, supported, takes_backend  # noqa: PLC0415

    if not supported(vllm.__version__):
        oldest, below = (".".join(map(str, version)) for version in (OLDEST, BELOW))
        raise SystemExit(f"vLLM {vllm.__version__} is not supported: pip install 'vllm>={oldest},<{below}'")
    served = UsageContext.OPENAI_API_SERVER  # sizes of batches as its own server has them: by default they are a quarter
    if takes_backend(engine_arguments):
        return engine_arguments(**chosen, sleep_mode_backend=NAME).create_engine_config(served)
    config = engine_arguments(**chosen).create_engine_config(served)
    config.model_config.sleep_mode_backend = NAME
    return config
