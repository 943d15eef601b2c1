"""How a vLLM is brought up: with which configuration, and where it keeps what it compiles."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from worker import gpus
from worker.engines.artefacts import Artefacts, environment, facts

_SOURCE: Final = "weights"


@contextlib.contextmanager
def kept(root: Path | None, source: Path, arguments: dict[str, Any], devices: list[str]) -> Iterator[Path]:
    """Within, every library that compiles keeps and finds its work below `root`. What it yields is how vLLM is told `source`.

    The key of what vLLM compiles has the model's path in it, so that no fine-tune would find what another has left. On one
    device it is told a relative one, the same for all, in a working directory of this start. Ranks would stay in there.
    """
    if root is None:
        yield source
        return
    known = facts("vllm", source, arguments, gpus.driver_version(), [gpus.architecture(one) for one in devices])
    with Artefacts(root).starting(known.fingerprint) as place:
        os.environ.update(environment(place))
        if len(devices) > 1:
            yield source
            return
        before = os.getcwd()
        with tempfile.TemporaryDirectory(prefix="start-", dir=place, ignore_cleanup_errors=True) as own:
            os.symlink(source.absolute(), os.path.join(own, _SOURCE))
            os.chdir(own)
            try:
                yield Path(_SOURCE)
            finally:
                os.chdir(before)


def settled(config: Any, source: Path) -> None:
    """After the start: whoever asks for the model's path gets one that stays."""
    config.model_config.model = str(source)


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
