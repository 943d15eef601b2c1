"""`python -m compose` is `enginehouse`."""

from compose.cli import main

main()
