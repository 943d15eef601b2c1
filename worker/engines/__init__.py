"""Engines: one interface, one process each. `transformers` is the reference; `fake` is scripted."""
