"""Views: pure functions from state to what a page shows. No clock, no I/O; ages are worked out by the reader's browser."""
