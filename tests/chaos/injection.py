"""Faults that are injected, and what each of them must leave behind."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

STEPS_LOST = 1
"""Most steps that a fault may cost a run that saves after every step."""


@dataclass
class Injection:
    """One injected fault and its consequences. `None` where a consequence is not known of this kind."""

    kind: str
    seed: int
    nodes: int = 1
    moment: str = ""
    """When it was injected, in words."""
    detected: float | None = None
    """Seconds until a message named the fault."""
    ended: float | None = None
    """Seconds until the last node ended; None if the run went on."""
    exits: list[int] = field(default_factory=list)
    """Exit codes of the nodes that could report one."""
    processes: int | None = None
    """Processes left."""
    files: int | None = None
    """Files left in /tmp, /dev/shm and under hidden names in the run's directory."""
    steps_lost: int | None = None
    readable: bool | None = None
    """Whether a whole checkpoint was there afterwards, if there was one before."""
    cause: str | None = ""
    """The message that named the fault; None if nobody was left to say it."""
    problems: list[str] = field(default_factory=list)
    """Broken promises; empty if the injection passed."""

    def expect(self, kept: bool, problem: str) -> None:
        """Notes a problem unless a promise was kept."""
        if not kept:
            self.problems.append(problem)

    def expect_clean(self) -> None:
        """What holds after every fault: nothing left, little lost, the checkpoint whole, the cause named."""
        self.expect(not self.processes, f"{self.processes} processes left")
        self.expect(not self.files, f"{self.files} files left")
        self.expect(self.steps_lost is None or self.steps_lost <= STEPS_LOST, f"{self.steps_lost} steps lost")
        self.expect(self.readable is not False, "no checkpoint can be read")
        self.expect(self.cause != "", "no message names the cause")


class NotStartedError(Exception):
    """What the fault was meant for did not start, on a machine that is too busy, so nothing was injected."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `act` injects it and fills in the consequences; it draws moment and place."""

    name: str
    act: Callable[[Random, Injection], None]

    def inject(self, seed: int) -> Injection:
        """Raises NotStartedError."""
        injection = Injection(self.name, seed)
        self.act(Random(f"{self.name} {seed}"), injection)
        return injection


def first_line(pattern: str, text: str) -> str:
    """The first line that matches; empty if none does."""
    return next((line.strip() for line in text.splitlines() if re.search(pattern, line)), "")
