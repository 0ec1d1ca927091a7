"""The faults: in which phases they can happen, and what an explanation must say of them."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.stalls.rank import ROUNDS

FULL_DISK = Path("/full")  # a small file system
MEETING, ALONE = ("update", "log_probs", "load", "save"), ("generate", "score")


@dataclass(frozen=True)
class Fault:
    """`act` is a method of `Rank` that misbehaves, or a key of what `at` does. The first line about the stall must
    name the rank and its node and match `says`, and a line about the node must match `node`. `at` is `rank` or
    `controller`; `release` is the signal that ends a rank's fault."""

    name: str
    act: str
    phases: tuple[str, ...]
    says: str
    node: str = ""
    release: int = signal.SIGUSR2
    at: str = "rank"


RANK, CONTROLLER = r" \(tests/stalls/rank.py:", r" \(tests/stalls/injecting.py:"
FAULTS = (
    Fault("a rank is stopped", "stop_itself", MEETING + ALONE, r"is stopped by a signal", release=signal.SIGCONT),
    Fault("late for a collective", "come_late", MEETING, "waits in come_late" + RANK),
    Fault("a rank leaves out a collective", "skip_a_collective", MEETING, r"has ended its call"),
    Fault("a deadlock in a worker", "take_a_lock_twice", MEETING + ALONE, "waits in take_a_lock_twice" + RANK),
    Fault("an engine loops", "loop_for_ever", ("generate",), "computes in loop_for_ever" + RANK),
    Fault("a reader blocks on a FIFO", "read_a_fifo", ("load",), r"waits in open \(.*, called by read_a_fifo" + RANK),
    Fault(
        "a full disk",
        "write_to_a_full_disk",
        ("save",),
        r"(waits|computes) in .*write_to_a_full_disk" + RANK,
        node=r"the run's directory is full",
    ),
    Fault("a reward function hangs", "wait_for_a_reward", ("score",), r"its process \d+, which waits in hang \("),
    Fault("a reward function loops", "wait_for_a_busy_reward", ("score",), r"its process \d+, which computes in loop"),
    Fault("a rank dies", "die", MEETING + ALONE, r"died during "),
    Fault(
        "the controller waits for a file",
        "read_a_fifo",
        ("the controller",),
        r"waits in open \(.*, called by read_a_fifo" + CONTROLLER,
        at="controller",
    ),
    Fault("the controller loops", "loop", ("the controller",), r"computes in .*loop" + CONTROLLER, at="controller"),
)


@dataclass(frozen=True)
class Injection:
    """One fault at one rank in one round of a phase, after some healthy phases."""

    seed: int
    fault: Fault
    rank: int
    phase: str
    round: int
    healthy: tuple[str, ...]

    def right(self, lines: list[str], address: str) -> bool:
        """Whether the explanation names fault, rank, node and phase."""
        if not lines:
            return False
        if self.fault.act == "die":
            return lines[0].startswith(f"actor rank {self.rank} on {address} died during {self.phase}")
        who = r"the controller on \S+, process \d+," if self.fault.at == "controller" else f"actor rank {self.rank} on "
        who += "" if self.fault.at == "controller" else re.escape(address)
        heading, first = lines[0], lines[1] if len(lines) > 1 else ""
        named = re.match(f"  {who} .*{self.fault.says}", first)
        node = not self.fault.node or any(
            re.match(f"  {re.escape(address)}: .*{self.fault.node}", line) for line in lines
        )
        return heading.startswith(f"no progress in {self.phase} for ") and named is not None and node


def draw(fault: Fault, seed: int, ranks: int) -> Injection:
    """An injection; the same seed draws the same."""
    random = Random(f"{fault.name} {seed}")
    healthy = tuple(random.choice(MEETING + ALONE) for _ in range(random.randint(0, 2)))
    rank, phase = random.randrange(ranks), random.choice(fault.phases)
    return Injection(seed, fault, rank, phase, random.randrange(ROUNDS), healthy)
