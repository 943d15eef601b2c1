"""Why an embedded or given server can't be used: a stable code, a sentence with the facts, and what to do."""

from typing import Literal

ServerCode = Literal[
    "binaries_missing", "data_of_other_major", "disk_full", "port_taken", "path_too_long", "postgres_too_old", "nats_too_old",
    "no_jetstream", "payload_too_small", "no_account", "not_starting", "not_answering", "not_ending",
]  # fmt: skip


class ServerRefusal(Exception):
    """Attributes: code, message (what is the case, with both numbers), cure (what to do about it)."""

    def __init__(self, code: ServerCode, message: str, cure: str) -> None:
        super().__init__(f"{message} {cure}")
        self.code, self.message, self.cure = code, message, cure
