"""Decisions: pure functions of (state, command, now)."""

from controlplane.decisions.decide import decide
from controlplane.decisions.draft import Decision, Draft

__all__ = ["Decision", "Draft", "decide"]
