"""Nodes, Ray's processes and signals: `launch` with real Ray on two and four nodes, processes of this machine.

The command counts and saves (`tests.chaos.counting`). Every injection continues the run of the one before it, so that
each of them also shows that the run of the last one could be resumed. Needs Ray: run it with the image's Python.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

from benchmarks.two_nodes import LAUNCH, REPOSITORY, SMALL, new_job
from tests.chaos.counting import rows_of
from tests.chaos.injection import Injection, Kind, NotStartedError, first_line
from tests.process_table import descendants, description, freeze, parents, stopped
from trainer.errors import CheckpointError
from trainer.runs.checkpoints.checkpoint import last_checkpoint, read_checkpoint

PATIENCE = 150.0
"""Seconds for each wait; an idle machine needs a tenth."""
CLEAN_UP = 10.0
"""Seconds that a `launch` has to end its processes after the other nodes ended, if its first process was killed."""
MARK = "SLIPWAY_CHAOS_JOB"
PLACES = (Path("/tmp"), Path("/dev/shm"))
NAMED = r"error: |\blost\b|\bdied\b|\bdisconnected\b"
NODE_LOST, RAY_FAILED, WORKER_FAILED = 13, 14, 5  # RAY_FAILED: it happened while Ray started


@dataclass
class Node:
    """A `launch` process, its descendants and its output."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def tree(self) -> list[int]:
        """Process ids, the one of `launch` first."""
        return [self.process.pid, *descendants(self.process.pid)]

    def find(self, pattern: str) -> int | None:
        """The process of this node whose name or command line matches."""
        return next((pid for pid in self.tree()[1:] if re.search(pattern, description(pid))), None)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Job:
    """The nodes of a job, which run a command on this run directory. What killed nodes leave in /tmp stays there."""

    run_dir: Path
    size: int
    command: Sequence[str]
    ray: bool = True
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    nodes: list[Node] = field(default_factory=list)
    places: Sequence[Path] = PLACES
    """Directories in which nothing may be left."""
    launches: Sequence[Sequence[str]] = ()
    """How each node starts `launch`, if not as a process of this host."""
    variables: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> "Job":
        self.rows_before = len(rows_of(self.run_dir))
        self.present = {path for place in self.places for path in place.iterdir()}
        self.logs = tempfile.TemporaryDirectory(prefix="chaos-logs-")
        environment = {
            **os.environ,
            **new_job(self.size),
            **self.variables,
            "SLIPWAY_DEADLINE": "120",
            MARK: self.mark,
        }
        launches = self.launches or [LAUNCH] * self.size
        for rank in range(self.size):
            log = Path(self.logs.name) / str(rank)
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*launches[rank], *(SMALL if self.ray else ["--no-ray"]), "--", *self.command],
                    env={**environment, "SLIPWAY_NODE_RANK": str(rank)},
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self.nodes.append(Node(process, log))
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left(set()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in self.nodes:
            node.process.kill()
            node.process.wait()
        self.logs.cleanup()

    def wait_until(self, reached: Callable[[], object], awaited: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline or any(node.process.poll() is not None for node in self.nodes):
                raise NotStartedError(f"no {awaited}:\n" + "\n".join(node.output() for node in self.nodes))
            time.sleep(0.02)

    def met(self) -> bool:
        return self.nodes[0].output().count(" joined from ") == self.size - 1

    def steps(self) -> list[int]:
        """The steps that this job has recorded."""
        rows = rows_of(self.run_dir)
        return [row["step"] for row in rows[self.rows_before :]]

    def left(self, gone: set[int]) -> list[int]:
        """Living processes of this job except for these."""
        return [pid for pid in parents() if pid not in gone and carries(pid, self.mark)]

    def new_files(self, gone_ranks: set[int]) -> list[Path]:
        """What was not there before, except for what nodes left that were killed as a whole."""
        present = {path for place in self.places for path in place.iterdir()} - self.present - {Path(self.logs.name)}
        ranks = "|".join(map(str, gone_ranks)) or "none"
        return [path for path in present if not re.fullmatch(rf"slipway-ray-\w+-({ranks})-\w+", path.name)]


@dataclass(frozen=True)
class Fault:
    """Signals to processes of a node: `process` matches a name or a command line; `node` and `launch` mean all
    processes of the node and the one that users know."""

    name: str
    on: str
    """`head`, `worker` or `any`."""
    process: str
    signals: Sequence[signal.Signals]
    exits: frozenset[int]
    cause: str
    """What the message must match."""
    ray: bool = True
    """Whether the job has a Ray cluster with a worker on every node; without, only the command counts."""
    when_running: bool = False
    """Whether it is injected between steps only; during start-up `launch` would start the process again."""

    @property
    def whole_node(self) -> bool:
        return self.process == "node"

    def inject(self, random: Random, injection: Injection) -> None:
        injection.nodes = 4 if injection.seed % 5 == 4 else 2
        run_dir = night(injection.nodes, self.ray)
        command = [sys.executable, "-m", "tests.chaos.counting", str(run_dir), *([] if self.ray else ["--alone"])]
        job = Job(run_dir, injection.nodes, command, self.ray)
        expected = resumes_at(run_dir)
        with job:
            job.wait_until(job.met, "meeting of all nodes")
            injection.moment = "during start-up"
            if self.when_running or injection.seed % 4 != 3:
                job.wait_until(job.steps, "first step")
                injection.moment = "between steps"
            time.sleep(random.uniform(0, 3))
            rank = self.strike(job, random)
            self._watch(job, rank, injection)
            look_back(job, injection, expected)
        injection.expect_clean()

    def strike(self, job: Job, random: Random) -> int:
        """Sends the signals to a node, as soon as the process exists; the rank of the node."""
        rank = {"head": 0, "worker": random.randrange(1, job.size)}.get(self.on, random.randrange(job.size))
        node = job.nodes[rank]
        pids: list[int] = []

        def there() -> bool:
            if self.whole_node:
                pids[:] = freeze(node.tree)  # else one that they start meanwhile would survive
            elif self.process == "launch":
                pids[:] = [node.process.pid]
            else:
                pid = node.find(self.process)
                pids[:] = [pid] if pid is not None else []
            return bool(pids)

        job.wait_until(there, f"process {self.process}")
        for number, sent in enumerate(self.signals):
            if number:
                time.sleep(random.uniform(0, 1))
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, sent)
        return rank

    def _watch(self, job: Job, rank: int, injection: Injection) -> None:
        """Waits for the message and the end of all nodes that can still report one."""
        began = time.monotonic()
        gone_ranks = {rank} if self.process in ("node", "launch") and self.signals[0] in (KILL, STOP) else set[int]()
        survivors = [node for number, node in enumerate(job.nodes) if number not in gone_ranks]
        while any(node.process.poll() is None for node in survivors) and time.monotonic() < began + PATIENCE:
            if injection.detected is None and any(re.search(NAMED, node.output()) for node in survivors):
                injection.detected = round(time.monotonic() - began, 2)
            time.sleep(0.02)
        injection.ended = round(time.monotonic() - began, 2)
        if injection.detected is None:
            injection.detected = injection.ended
        injection.exits = [-1 if (code := node.process.poll()) is None else code for node in survivors]
        injection.expect(
            set(injection.exits) <= self.exits, f"exit codes {injection.exits} instead of {sorted(self.exits)}"
        )
        output = "\n".join(node.output() for node in survivors)
        injection.cause = first_line(self.cause, output)
        injection.expect("Traceback" not in output, "a traceback: " + output[output.find("Traceback") :][:2000])
        if not injection.cause:
            injection.problems.append("output: " + output[-2000:])
        frozen = stopped() if self.whole_node else set[int]()
        while (left := job.left(frozen)) and time.monotonic() < began + injection.ended + CLEAN_UP:
            time.sleep(0.05)
        injection.processes = len(left)
        injection.files = len(job.new_files(gone_ranks if self.whole_node else set()))


def look_back(job: Job, injection: Injection, expected: int) -> None:
    """What the run's directory holds."""
    steps = job.steps()
    if steps:
        injection.moment += f", step {steps[-1]}"
        injection.expect(steps[0] == expected, f"went on with step {steps[0]} instead of {expected}")
        totals = rows_of(job.run_dir)[-1]["totals"]
        right = steps[-1] * (steps[-1] + 1) // 2
        injection.expect(set(totals) == {right}, f"step {steps[-1]} has the totals {totals} instead of {right}")
    if last_step(job.run_dir):
        try:
            last = last_checkpoint(job.run_dir)
            injection.readable = last is not None
            saved = read_checkpoint(last).step if last else 0
        except CheckpointError as error:
            injection.readable, saved = False, 0
            injection.problems.append(str(error))
        injection.steps_lost = max(0, last_step(job.run_dir) - saved)


@cache
def night(nodes: int, ray: bool) -> Path:
    """The run's directory of all such jobs."""
    return Path(tempfile.mkdtemp(prefix="chaos-night-")) / f"on_{nodes}_nodes_{'with' if ray else 'without'}_ray"


def last_step(run_dir: Path) -> int:
    rows = rows_of(run_dir)
    return int(str(rows[-1]["step"])) if rows else 0


def resumes_at(run_dir: Path) -> int:
    """The first step of the next job."""
    last = last_checkpoint(run_dir)
    return 1 + (read_checkpoint(last).step if last else 0)


def carries(pid: int, mark: str) -> bool:
    """Whether a process inherited this job's mark."""
    with suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def codes(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


RAYLET, GCS, COMMAND, RANK = (
    r"^raylet ",
    r"^gcs_server ",
    r"^python\S* \S+ -m tests.chaos.counting",
    r"^ray::ActorWorke",
)
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
FAULTS = (
    Fault("worker node killed", "worker", "node", [KILL], codes(NODE_LOST), r"error: node \d"),
    Fault("head node killed", "head", "node", [KILL], codes(NODE_LOST), r"error: node 0"),
    Fault("worker node silent", "worker", "node", [STOP], codes(NODE_LOST), r"error: node \d"),
    Fault("head node silent", "head", "node", [STOP], codes(NODE_LOST), r"error: node 0"),
    Fault("`launch` killed", "any", "launch", [KILL], codes(NODE_LOST), r"error: .*lost: its launch was killed"),
    Fault("raylet killed", "any", RAYLET, [KILL], codes(NODE_LOST, RAY_FAILED), r"error: .*raylet"),
    Fault("GCS killed", "head", GCS, [KILL], codes(NODE_LOST, RAY_FAILED), r"error: .*(GCS|gcs_server)"),
    Fault("raylet stopped", "any", RAYLET, [STOP], codes(NODE_LOST), r"error: .*raylet is stopped", when_running=True),
    Fault("GCS stopped", "head", GCS, [STOP], codes(NODE_LOST), r"error: .*gcs_server is stopped", when_running=True),
    Fault("command killed", "head", COMMAND, [KILL], codes(137), r"SIGKILL killed the command"),
    Fault("rank killed", "any", RANK, [KILL], codes(WORKER_FAILED), r"error: actor rank \d .* died"),
    Fault("rank stopped", "any", RANK, [STOP], codes(WORKER_FAILED), r"error: actor rank \d .*no answer"),
    Fault("SIGTERM", "any", "launch", [TERM], codes(143), r"error: node \d .* received SIGTERM"),
    Fault("SIGTERM twice", "any", "launch", [TERM, TERM], codes(143), r"error: node \d .* received SIGTERM"),
    Fault("SIGUSR1", "any", "launch", [signal.SIGUSR1], codes(138), r"error: node \d .* received SIGUSR1"),
)
WITHOUT_RAY = tuple(
    Kind(f"{fault.name}, no Ray", replace(fault, ray=False).inject)
    for fault in FAULTS
    if fault.process in ("node", "launch", COMMAND)
)
"""Jobs of `launch --no-ray`, which start in a second."""
KINDS = (*WITHOUT_RAY, *(Kind(fault.name, fault.inject) for fault in FAULTS))
