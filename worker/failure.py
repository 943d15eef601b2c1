"""Why a step did not reach its end: a stable code and a sentence with what to do, as it goes into the report."""

import errno
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a disk says that takes no more, or no more of ours."""


class StepFailed(Exception):
    """The instance can't go on. `code` as in `InstanceFailed`; `final`: trying again would not help."""

    def __init__(self, code: str, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.code, self.message, self.final = code, message, final
