"""Why a command of `enginehouse` can't be carried out in this environment: exit code 2."""


class EnvironmentRefusal(Exception):
    """What is the case, with both numbers; and what to do about it. Attributes: code (stable), message, cure."""

    def __init__(self, code: str, message: str, cure: str) -> None:
        super().__init__(f"{message} {cure}")
        self.code, self.message, self.cure = code, message, cure


class ApiRefused(Exception):
    """The plane said no. Attributes: status (HTTP), code (stable), message, retry_after_s."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s
