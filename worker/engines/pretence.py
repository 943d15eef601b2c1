"""What a fake model is, to those that write its weights and to the engine that reads them. (Without numpy: the worker is slim.)"""

from typing import Final

CONTEXT_TOKENS: Final = 4096
IDENTITY: Final = "fake.identity"
"""A small tensor that differs in every weight set: a wrong mapping is seen by reading it."""
