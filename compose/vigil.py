"""When a process that is alive has stopped for good: the judgement of the supervisor. Pure; times are seconds of an uptime.

    answers ──(a question unanswered)──> silent ──(long enough, and not at work)──> lost: killed, and started again
       ^                                    │
       └──────────(it answers)──────────────┘

A busy machine must never cost a process its life. One that waits for a processor (`R`) or a disk (`D`), or that has used its
processor, is given the longer time; only one that does nothing at all with the question before it has the shorter one. Time in
which we stood still ourselves, or in which the question could not get there, is held against nobody.
"""

from typing import Final, Literal

import msgspec

MISSES: Final = 3
"""Questions in a row; however long a single one has taken."""
STOOD_S: Final = 3.0
"""A second that took so long was no second of ours: this process was stopped, or the machine was suspended."""
AT_WORK: Final = 0.01
"""Of a processor. One that stands still may have a thread that turns over now and then."""

GAVE_NO_ANSWER: Final = "gave no answer"
"""How a verdict begins; `doctor` looks for it."""


class Patience(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. The environment may carry others (`watch.PATIENCE`)."""

    every: float = 10.0
    """Between an answer and the next question."""
    answer: float = 10.0
    """For an answer; the next question follows at once."""
    frozen: float = 60.0
    """Without an answer and without work."""
    hung: float = 300.0
    """Without an answer, however much it works: Postgres may recover, a processor may have a hundred claimants."""


Condition = Literal["runs", "waits", "disk", "stopped", "traced"]


class Vitals(msgspec.Struct, frozen=True):
    """What the kernel says of a process."""

    state: Condition
    cpu_s: float


class Standstill:
    """Whether we stood still ourselves, told every second what time it is."""

    def __init__(self, now: float) -> None:
        self._told = self._over = now

    def tick(self, now: float) -> None:
        if now - self._told > STOOD_S:
            self._over = now
        self._told = now

    def within(self, began: float, now: float) -> bool:
        """Whether that was so at any time from `began` on."""
        return now - self._told > STOOD_S or self._over > began


class Vigil:
    """Over one run of a process. Told of every question how it went, it says when enough is enough."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._looked = now
        self._answered = False
        self._misses: list[Vitals] = []
        """Since the last answer."""
        self.silent_s = 0.0
        """Of questions that it could have answered."""

    def answered(self, now: float) -> None:
        self._answered = True
        self.excused(now)

    def excused(self, now: float) -> None:
        """It could not be asked: what comes counts anew."""
        self._looked, self.silent_s = now, 0.0
        self._misses.clear()

    def missed(self, now: float, vitals: Vitals) -> str | None:
        """A question had no answer. Returns what is wrong once the process is to be killed."""
        passed_s, most_s = now - self._looked, self._patience.every + self._patience.answer
        if passed_s > most_s + self._patience.answer:  # we were away ourselves
            self.excused(now)
            return None
        if not self._answered and vitals.state != "stopped":  # it is on its way up, or stands by
            self.excused(now)
            return None
        self._looked = now
        self.silent_s += min(passed_s, most_s)
        self._misses.append(vitals)
        if len(self._misses) < MISSES or vitals.state == "traced":  # somebody looks into it
            return None
        doing = self._doing()
        if self.silent_s < (self._patience.hung if doing == "worked" else self._patience.frozen):
            return None
        return f"{GAVE_NO_ANSWER} for {self.silent_s:.0f} s, {len(self._misses)} questions, and {doing}"

    def _doing(self) -> Literal["was stopped", "did nothing", "worked"]:
        if all(vitals.state == "stopped" for vitals in self._misses[-MISSES:]):
            return "was stopped"
        states = {vitals.state for vitals in self._misses}
        used_s = self._misses[-1].cpu_s - self._misses[0].cpu_s
        return "worked" if states & {"runs", "disk"} or used_s > AT_WORK * self.silent_s else "did nothing"
