"""What engines are asked when they are measured."""

from typing import Final

TOKENS: Final = 64
"""Of each greedy answer that is compared."""
MANY: Final = 256
"""Sequences at once, and tokens of each, of a throughput."""
PROMPT: Final = tuple(range(10, 42))
PROMPTS: Final = tuple((5 + number, 7, 9) for number in range(MANY))
