"""The faults: in which phases they can happen, and what an explanation must say of them."""

import re
import signal
from dataclasses import dataclass
from random import Random

from tests.stalls.rank import ROUNDS


@dataclass(frozen=True)
class Fault:
    """`method` of `Rank` misbehaves. The first line about the stall must name the rank and match `says`; `node` must
    match a line about its node. `release` is the signal that ends it."""

    name: str
    method: str
    phases: tuple[str, ...]
    says: str
    node: str = ""
    release: int = signal.SIGUSR2


MEETING, ALONE = ("update", "log_probs", "load", "save"), ("generate", "score")
FAULTS = (
    Fault("a rank is stopped", "stop_itself", MEETING + ALONE, r"is stopped by a signal", release=signal.SIGCONT),
    Fault("late for a collective", "come_late", MEETING, r"waits in come_late \(tests/stalls/rank.py:"),
    Fault("a rank leaves out a collective", "skip_a_collective", MEETING, r"has ended its call"),
    Fault("a deadlock in a worker", "take_a_lock_twice", MEETING + ALONE, r"waits in take_a_lock_twice \("),
    Fault("an engine loops", "loop_for_ever", ("generate",), r"computes in loop_for_ever \("),
    Fault(
        "a reader blocks on a FIFO",
        "read_a_fifo",
        ("load",),
        r"waits in open \(.*, called by read_a_fifo \(tests/stalls/rank.py:",
    ),
    Fault(
        "a full disk", "write_to_a_full_disk", ("save",), r"(waits|computes) in ", node=r"the run's directory is full"
    ),
    Fault("a reward function hangs", "wait_for_a_reward", ("score",), r"its process \d+, which waits in hang \("),
    Fault("a reward function loops", "wait_for_a_busy_reward", ("score",), r"its process \d+, which computes in loop"),
    Fault("a rank dies", "die", MEETING + ALONE, r"died during "),
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

    def right(self, address: str, lines: list[str]) -> bool:
        """Whether the explanation names fault, rank, node and phase."""
        if self.fault.method == "die":
            return lines[0].startswith(f"actor rank {self.rank} on {address} died during {self.phase}")
        heading, first = lines[0], lines[1] if len(lines) > 1 else ""
        named = re.match(rf"  actor rank {self.rank} on {re.escape(address)} .*{self.fault.says}", first)
        node = not self.fault.node or any(re.search(self.fault.node, line) for line in lines)
        return heading.startswith(f"no progress in {self.phase} for ") and named is not None and node


def draw(seed: int, ranks: int, only: str = "") -> Injection:
    """An injection; the same seed draws the same."""
    random = Random(seed)
    faults = [fault for fault in FAULTS if only in fault.name]
    fault = faults[seed % len(faults)]
    healthy = tuple(random.choice(MEETING + ALONE) for _ in range(random.randint(0, 2)))
    return Injection(
        seed, fault, random.randrange(ranks), random.choice(fault.phases), random.randrange(ROUNDS), healthy
    )
