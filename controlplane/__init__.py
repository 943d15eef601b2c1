"""The event-sourced control plane: events, commands, the fleet's state, decisions, the log."""
