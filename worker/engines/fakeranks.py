"""The ranks of a gang that only pretends: a process for each, with the weights mapped and nothing computed.

What is real about them is what a gang is about: they are told as one, one that fails sends the others back, one that dies takes
all with it. `python -m worker.engines.fakeranks` is one of them; its orders come line by line.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from typing import Any, Final

from worker import tether
from worker.engines.interface import EngineFault
from worker.engines.weights import Weights

ORDER_S: Final = 20.0


class FakeRanks:
    """A rank that ends takes this process with it, at once."""

    def __init__(self, count: int) -> None:
        argv = [sys.executable, "-P", "-m", "worker.engines.fakeranks"]
        self._ranks = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
        self._pidfds = [os.pidfd_open(rank.pid) for rank in self._ranks]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self.order("look")

    def order(self, order: str, **words: Any) -> None:
        """Have all ranks do it. Raises EngineFault of the first that could not, once all have answered, or `rank_silent`."""
        line = json.dumps({"do": order, **words}).encode() + b"\n"
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
        ends = time.monotonic() + ORDER_S
        answers = [self._answer(number, order, ends) for number in range(len(self._ranks))]
        for number, answer in enumerate(answers):
            if answer:
                raise EngineFault(answer["code"], f"rank {number} of {len(answers)}: {answer['message']}")

    def _answer(self, number: int, order: str, ends: float) -> dict[str, str]:
        stream = self._ranks[number].stdout
        assert stream is not None
        if not select.select([stream], [], [], max(0.0, ends - time.monotonic()))[0]:
            message = f"rank {number} of {len(self._ranks)} did not answer {order} within {ORDER_S:g} s"
            raise EngineFault("rank_silent", message, fatal=True)
        answer: dict[str, str] = json.loads(stream.readline())
        return answer

    def _watch(self) -> None:
        died = wait(self._pidfds)
        number = next(n for n, pidfd in enumerate(self._pidfds) if pidfd in died)
        print(f"rank {number} of {len(self._ranks)} died: the gang ends", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(70)


def main() -> None:
    tether.die_with(os.getppid())
    weights = Weights()
    for line in sys.stdin:
        told = json.loads(line)
        answer: dict[str, str] = {}
        try:
            match told["do"]:
                case "attach":
                    weights.map(weights.reference(told["pool_socket"], told["weight_set"]))
                case "detach":
                    weights.unmap()
                case "wake" if told["fail"]:
                    raise EngineFault("failed", "told to fail at the wake")
                case _:
                    pass
        except EngineFault as fault:
            answer = {"code": fault.code, "message": fault.message}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
