"""The faults: in which phases they can happen, and what an explanation must say of them."""

import re
import signal
from dataclasses import dataclass
from random import Random

from tests.stalls.rank import ROUNDS

MEETING, ALONE = ("update", "log_probs", "load", "save"), ("generate", "score")


@dataclass(frozen=True)
class Fault:
    """`act` is a method of `Rank` that misbehaves, or a key of what `at` does. The first line about the stall must
    name the rank and its node and match `says`, and a line about the node must match `node`. `release` is the signal
    that ends a rank's fault."""

    name: str
    act: str
    phases: tuple[str, ...]
    says: str
    node: str = ""
    release: int = signal.SIGUSR2
    at: str = "rank"
    """`rank`, `controller`, or `node`: then `tests.stalls.nodes` injects it from outside of the containers."""


RANK, CONTROLLER = r" \(tests/stalls/rank.py:", r" \(tests/stalls/controller.py:"
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
    Fault(
        "a node without the collectives' network",
        "cut the collectives' network",
        MEETING,
        r"(waits in|has ended its call).* [\d.]+ cannot reach its node at {collectives}, which is on no interface",
        at="node",
    ),
    Fault(
        "a node without any network",
        "cut all networks",
        MEETING,
        r"is on a node that does not answer: {head} cannot reach it \(",
        at="node",
    ),
    Fault(
        "a frozen node",
        "freeze",
        MEETING,
        r"is on a node that does not answer: it accepts connections, so its processes are frozen",
        at="node",
    ),
    Fault(
        "a slow processor, standing in for a slow GPU",
        "slow down",
        MEETING + ALONE,
        "computes in compute" + RANK,
        node=r"the container's CPU limit held processes back",
        at="node",
    ),
)


@dataclass(frozen=True)
class Injection:
    """One fault at one rank in one round of a phase, after some healthy phases. One of a node begins `after` seconds
    after the phases did."""

    seed: int
    fault: Fault
    rank: int
    phase: str
    round: int
    healthy: tuple[str, ...]
    after: float

    def right(self, lines: list[str], address: str, **addresses: str) -> bool:
        """Whether the explanation names fault, rank, node and phase. `addresses` are those that `says` names."""
        if not lines:
            return False
        if self.fault.act == "die":
            return lines[0].startswith(f"actor rank {self.rank} on {address} died during {self.phase}")
        says = self.fault.says
        for name, value in addresses.items():
            says = says.replace(f"{{{name}}}", re.escape(value))
        who = r"the controller on \S+, process \d+," if self.fault.at == "controller" else f"actor rank {self.rank} on "
        who += "" if self.fault.at == "controller" else re.escape(address)
        heading, first = lines[0], lines[1] if len(lines) > 1 else ""
        named = re.match(f"  {who} .*{says}", first)
        node = not self.fault.node or any(
            re.match(f"  {re.escape(address)}: .*{self.fault.node}", line) for line in lines
        )
        return heading.startswith(f"no progress in {self.phase} for ") and named is not None and node


def draw(fault: Fault, seed: int, ranks: int) -> Injection:
    """An injection; the same seed draws the same."""
    random = Random(f"{fault.name} {seed}")
    healthy = tuple(random.choice(MEETING + ALONE) for _ in range(random.randint(0, 2)))
    # The controller runs beside rank 0, so that node keeps Ray's network and its processors.
    first = 1 if fault.at == "node" and fault.act != "cut the collectives' network" else 0
    rank, phase = random.randrange(first, ranks), random.choice(fault.phases)
    return Injection(seed, fault, rank, phase, random.randrange(ROUNDS), healthy, random.uniform(0, 1))
