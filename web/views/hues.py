"""One hue per configuration: what shares a skeleton has one colour, wherever it is drawn."""

from collections.abc import Mapping
from typing import Final

from controlplane.fleet import Fleet

HUES: Final = 8
"""As many as the style sheet has (`.hue-0` ... `.hue-7`): more could not be told apart."""


def hues(fleet: Fleet) -> Mapping[str, int]:
    """Configuration -> hue, by rank of its id, so that few configurations never fall together."""
    return {configuration: rank % HUES for rank, configuration in enumerate(sorted(fleet.configurations))}
