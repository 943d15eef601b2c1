"""Why a step did not reach its end: a stable code and a sentence with what to do, as it goes into the report."""


class StepFailed(Exception):
    """The instance can't go on. `code` as in `InstanceFailed`; `final`: trying again would not help."""

    def __init__(self, code: str, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.code, self.message, self.final = code, message, final
