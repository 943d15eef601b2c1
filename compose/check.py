"""One thing that was looked at on this machine, and its cure."""

from typing import Literal

import msgspec

Verdict = Literal["ok", "note", "bad"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`bad`: a plane will not run; `note`: it will, without something."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""
