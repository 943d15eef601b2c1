"""A snapshot is a fold kept beside the log. Whoever changes what a log means must raise EVOLVE_VERSION, or starts go on from
states that no log gives any more."""

from controlplane.fleet import EVOLVE_VERSION
from tests import folding


def test_the_same_log_means_the_same_or_the_version_is_another() -> None:
    was, now = folding.stored(), folding.mark()
    assert now["digest"] == was["digest"] or was["evolve_version"] < EVOLVE_VERSION, (
        "a recorded log folds to another state than when EVOLVE_VERSION was set: raise it (controlplane/fleet/state.py), then "
        "run `python -m tests.folding`"
    )
    assert now == was, "EVOLVE_VERSION is another: run `python -m tests.folding` and commit its mark"


def test_the_recorded_log_has_most_of_all_there_is() -> None:
    types = {recorded.type for recorded in folding.events()}
    assert len(types) >= 47
