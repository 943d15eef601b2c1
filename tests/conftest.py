"""Fixtures of every tier."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.plane import NODE, PlaneUnderTest, fake, running

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Tests run beside others: torch's threads, of which each spins until the last has come, then take minutes for seconds' work.
Engines say themselves how many they have, and that they wait."""
THREE = NODE + fake("alpha") + fake("beta", context_tokens=3000) + fake("gamma", tokens_per_s=200)
"""Three models that take a whole device each, and two devices."""


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneUnderTest]:
    """A plane with models alpha, beta and gamma on two devices, for tests that leave it as well as it was."""
    with running(THREE) as started:
        yield started


@pytest.fixture
def start_plane() -> Iterator[Callable[..., PlaneUnderTest]]:
    """Start a plane of one's own with these settings; it is audited and ended after the test."""
    with ExitStack() as stack:
        yield lambda settings=THREE, *options: stack.enter_context(running(settings, *options))
