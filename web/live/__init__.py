"""Live updates: the latest-frame hub, what paints into it, and the stream that readers follow."""
