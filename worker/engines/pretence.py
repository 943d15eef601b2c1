"""What a fake model is, to those who write its weights and to the engine that reads them. No numpy: the worker is slim."""

from typing import Final

CONTEXT_TOKENS: Final = 4096
IDENTITY: Final = "fake.identity"
"""A small tensor that differs in every weight set: a wrong mapping is seen by reading it."""
