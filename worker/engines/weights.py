"""The weight set that an engine has mapped: the pool's memory, read-only, at addresses that never change."""

import numpy as np
import numpy.typing as npt

from controlplane.quantities import human_bytes
from pool.client import Attachment, PoolRefused, attach
from pool.mapping import Reservation
from pool.messages import Attached, Tensor
from worker.engines.interface import EngineFault


class Weights:
    """At most one set at a time. The reservation grows only while nothing is mapped."""

    def __init__(self) -> None:
        self._reservation: Reservation | None = None
        self._attachment: Attachment | None = None

    @property
    def mapped(self) -> Attached | None:
        return self._attachment.attached if self._attachment is not None else None

    @property
    def bytes_mapped(self) -> int:
        return self._reservation.attached_bytes if self._reservation is not None else 0

    def reference(self, pool_socket: str, weight_set: str) -> Attachment:
        """Reference a set at the pool, without mapping it yet: its tensors are known, and may still be refused.

        Raises:
            EngineFault: the pool's own code, or `pool` when it does not answer.
        """
        try:
            return attach(pool_socket, weight_set)
        except PoolRefused as refused:
            raise EngineFault(refused.code, refused.message) from refused
        except OSError as error:
            raise EngineFault("pool", f"the pool at {pool_socket} does not answer: {error}") from error

    def map(self, attachment: Attachment) -> None:
        """Map what was referenced. On failure nothing is mapped and the reference is given back."""
        assert self._attachment is None, "detach first"
        sizes = attachment.attached.segments
        try:
            if self._reservation is None or self._reservation.size < sum(sizes):
                self._reservation = Reservation(sum(sizes))
            self._reservation.attach(attachment.fds, sizes, populate=True)  # else the first token pays for the page faults
        except (OSError, ValueError) as error:
            attachment.close()
            raise EngineFault("no_memory", f"mapping {human_bytes(sum(sizes))}: {error}") from error
        attachment.close_fds()
        self._attachment = attachment

    def unmap(self) -> None:
        """Unmap, then give the reference back. Twice is fine."""
        if self._attachment is None:
            return
        assert self._reservation is not None
        self._reservation.detach()
        self._attachment.close()
        self._attachment = None

    def view(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor of the mapped set; valid while it is mapped."""
        assert self._reservation is not None
        return self._reservation.view(self._reservation.start(tensor.segment) + tensor.offset, tensor.size_bytes)

    def place(self) -> int:
        """Where the mapping begins: views made over one place stay right as long as it is the same."""
        return self._reservation.address if self._reservation is not None else 0
