"""What of a model's configuration makes its skeleton: models whose configurations read the same here can share one."""

import json
from typing import Any, Final

_NAMELESS: Final = ("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache", "id2label", "label2id")
"""Keys of a configuration that say nothing of a skeleton; with them all `..._token_id`, which fine-tunes change freely."""


def normalised(config: Any) -> str:
    """Return a configuration as JSON in one form, without what does not shape the skeleton."""
    kept = {
        key: value
        for key, value in config.to_dict().items()
        if key not in _NAMELESS and not key.endswith(("_token_id", "_name_or_path")) and value is not None
    }
    return json.dumps(kept, sort_keys=True, default=str)
