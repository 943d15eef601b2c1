"""The event-sourced control plane: events, commands, the fleet's state, decisions, the log."""

from controlplane import lean

lean.install()
