"""The frontend: one per instance. Text in, text out; ids to and from the engine; the record of every request in flight."""
