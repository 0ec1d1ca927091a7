"""Networks that lose packets, are slow, go away for a moment, or are cut, between the nodes of a `launch` job.

Each node has a network namespace; a namespace in their middle routes, and has the faults: its firewall drops packets, a
token bucket limits the rate. Nodes see the files of a container of the cpu image, so that what they leave there is
theirs. Needs root, iptables and a Docker engine with `slipway:cpu`.
"""

import atexit
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random

from benchmarks.two_nodes import REPOSITORY
from tests.chaos.injection import Injection, Kind, first_line
from tests.chaos.jobs import CLEAN_UP, NAMED, NODE_LOST, PATIENCE, Job, look_back, resumes_at
from tests.process_table import description

IMAGE = "slipway:cpu"
PYTHON = "/opt/slipway/venv/bin/python"
SILENCE = 10.0
"""Seconds without a heartbeat after which `launch` counts a node as lost."""
SLACK = 10.0
"""Seconds in which nodes of a busy machine notice that they have passed."""
UNDER_FAULT = 25.0
"""Seconds that a job goes on under a fault that must not end it."""
LOSS, RATE, AWAY = (0.02, 0.2), (64, 1024), (1.0, 5.0)
"""Share of packets, kbit/s and seconds that a job without Ray must bear."""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass
class Network:
    """A router and the namespace of each node, which are gone at the end of the context."""

    size: int
    name: str = field(default_factory=lambda: f"chaos-{secrets.token_hex(3)}")

    @property
    def router(self) -> str:
        return f"{self.name}-router"

    def node(self, rank: int) -> str:
        return f"{self.name}-{rank}"

    def address(self, rank: int) -> str:
        return f"10.213.{rank}.2"

    def at_router(self, *command: str) -> str:
        return run("ip", "netns", "exec", self.router, *command)

    @contextmanager
    def up(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in (self.router, *map(self.node, range(self.size))):
                run("ip", "netns", "add", name)
                stack.callback(run, "ip", "netns", "delete", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.at_router("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
            for rank in range(self.size):
                ends = (self.router, f"node{rank}", f"10.213.{rank}.1"), (self.node(rank), "eth0", self.address(rank))
                names = [*ends[0][1:2], "netns", self.router, "type", "veth", "peer", "name", "eth0"]
                run("ip", "link", "add", *names, "netns", self.node(rank))
                for namespace, device, address in ends:
                    run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device)
                    run("ip", "-n", namespace, "link", "set", device, "up")
                run("ip", "-n", self.node(rank), "route", "add", "default", "via", f"10.213.{rank}.1")
            yield

    def lose(self, share: float) -> None:
        drop = ("-m", "statistic", "--mode", "random", "--probability", f"{share:.3f}", "-j", "DROP")
        self.at_router("iptables", "-A", "FORWARD", *drop)

    def slow_down(self, kilobits: int) -> None:
        for rank in range(self.size):
            bucket = ("tbf", "rate", f"{kilobits}kbit", "burst", "4kb", "limit", "64kb")
            self.at_router("tc", "qdisc", "add", "dev", f"node{rank}", "root", *bucket)

    def cut(self, rank: int, ways: Sequence[str]) -> None:
        """Drops what comes from (-s) or goes to (-d) a node."""
        for way in ways:
            self.at_router("iptables", "-I", "FORWARD", way, self.address(rank), "-j", "DROP")

    def dropped(self) -> int:
        """Packets that the firewall has dropped since its last change."""
        rules = self.at_router("iptables", "-L", "FORWARD", "-v", "-x", "-n").splitlines()
        return sum(int(rule.split()[0]) for rule in rules if " DROP " in rule)

    def mend(self) -> None:
        self.at_router("iptables", "-F", "FORWARD")


@cache
def files() -> tuple[int, Path]:
    """A process in the container whose files the nodes see, and a directory that it shares with this process."""
    shared = tempfile.mkdtemp(prefix="chaos-night-")
    atexit.register(shutil.rmtree, shared)
    name = f"chaos-{secrets.token_hex(3)}"
    mounts = ("-v", f"{REPOSITORY}:{REPOSITORY}:ro", "-v", f"{shared}:{shared}")
    # Nodes are processes of this host, so /proc has to show those.
    options = ("--rm", "-i", "--pid", "host", "--name", name, "--network", "none", "--shm-size", "1g")
    subprocess.Popen(  # the container ends with this process, whose standard input it reads
        ["docker", "run", *options, *mounts, "--entrypoint", "cat", IMAGE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        asked = ["docker", "inspect", "--format", "{{.State.Pid}}", name]
        count = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()
        if count not in ("", "0"):
            return int(count), Path(shared)
        time.sleep(0.2)
    raise TimeoutError(f"the container {name} did not start")


def job_on(network: Network, run_dir: Path, command: Sequence[str], ray: bool) -> Job:
    """A job whose nodes are in the namespaces of a network."""
    container, _ = files()
    into_files = ("nsenter", "--target", str(container), "--mount", f"--wdns={REPOSITORY}")
    return Job(
        run_dir,
        network.size,
        command,
        ray,
        places=[Path(f"/proc/{container}/root/{name}") for name in ("tmp", "dev/shm")],
        launches=[
            ("ip", "netns", "exec", network.node(rank), *into_files, PYTHON, "-m", "entrypoints")
            for rank in range(network.size)
        ],
        variables={
            "SLIPWAY_HOSTS": ",".join(map(network.address, range(network.size))),
            "PATH": f"{Path(PYTHON).parent}:/usr/local/bin:/usr/bin:/bin:{os.environ['PATH']}",
        },
    )


Strike = Callable[[Network, Random, Injection], None]


def inject(strike: Strike, ends: bool, ray: bool, random: Random, injection: Injection) -> None:
    """Strikes a job between two steps, which has to end or to go on."""
    injection.nodes = 4 if injection.seed % 5 == 4 and not ray else 2
    _, shared = files()
    run_dir = shared / f"on_{injection.nodes}_nodes_{'with' if ray else 'without'}_ray"
    command = [PYTHON, "-m", "tests.chaos.counting", str(run_dir), *([] if ray else ["--alone"])]
    network, expected = Network(injection.nodes), resumes_at(run_dir)
    with network.up(), job_on(network, run_dir, command, ray) as job:
        job.wait_until(job.met, "meeting of all nodes")
        job.wait_until(job.steps, "first step")
        time.sleep(random.uniform(0, 3))
        strike(network, random, injection)
        struck = time.monotonic()
        if not ends:
            go_on(job, network, injection)
            network.mend()
            os.kill(launch_of(job, random.randrange(injection.nodes)), signal.SIGTERM)
        wait_for_end(job, injection, struck if ends else time.monotonic())
        codes = NODE_LOST if ends else 128 + signal.SIGTERM
        injection.expect(
            set(injection.exits) == {codes}, f"exit codes {injection.exits} instead of {codes}: {outputs(job)[-2000:]}"
        )
        if ends:
            injection.cause = first_line(rf"error: node \d.* lost: no heartbeat for {SILENCE:.0f} s", outputs(job))
            late = injection.detected is None or injection.detected > SILENCE + SLACK
            injection.expect(not late, f"noticed after {injection.detected} s: {outputs(job)[-2000:]}")
        else:
            injection.cause = injection.detected = None
        injection.expect("Traceback" not in outputs(job), f"a traceback: {outputs(job)[-3000:]}")
        injection.processes, injection.files = len(left(job)), len(job.new_files(set()))
        look_back(job, injection, expected)
    injection.expect_clean()


def go_on(job: Job, network: Network, injection: Injection) -> None:
    """Watches a job that has to go on."""
    end, before = time.monotonic() + UNDER_FAULT, len(job.steps())
    while time.monotonic() < end and all(node.process.poll() is None for node in job.nodes):
        time.sleep(0.1)
    if dropped := network.dropped():
        injection.moment += f", {dropped} packets dropped"
    named = first_line(NAMED, outputs(job))
    injection.expect(not named, f"a job that had to go on said: {named}")
    injection.expect(len(job.steps()) > before, f"no step in {UNDER_FAULT:.0f} s")


def launch_of(job: Job, rank: int) -> int:
    """The first process of `launch` on a node: `ip` and `nsenter` have become it."""
    pid = job.nodes[rank].process.pid
    assert "entrypoints" in description(pid)
    return pid


def wait_for_end(job: Job, injection: Injection, since: float) -> None:
    while any(node.process.poll() is None for node in job.nodes) and time.monotonic() < since + PATIENCE:
        if injection.detected is None and re.search(NAMED, outputs(job)):
            injection.detected = round(time.monotonic() - since, 2)
        time.sleep(0.02)
    injection.ended = round(time.monotonic() - since, 2)
    injection.detected = injection.ended if injection.detected is None else injection.detected
    injection.exits = [-1 if (code := node.process.poll()) is None else code for node in job.nodes]


def left(job: Job) -> list[int]:
    deadline = time.monotonic() + CLEAN_UP
    while (pids := job.left(set())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def outputs(job: Job) -> str:
    return "\n".join(node.output() for node in job.nodes)


def lossy(most: float, network: Network, random: Random, injection: Injection) -> None:
    share = random.uniform(LOSS[0], most)
    network.lose(share)
    injection.moment = f"{share:.0%} lost"


def slow(least: int, network: Network, random: Random, injection: Injection) -> None:
    kilobits = random.randint(least, least * RATE[1] // RATE[0])
    network.slow_down(kilobits)
    injection.moment = f"{kilobits} kbit/s"


def away(network: Network, random: Random, injection: Injection) -> None:
    seconds, rank = random.uniform(*AWAY), random.randrange(network.size)
    network.cut(rank, ["-s", "-d"])
    time.sleep(seconds)
    injection.moment = f"node {rank} for {seconds:.1f} s, {network.dropped()} packets dropped"
    network.mend()


def cut(network: Network, random: Random, injection: Injection) -> None:
    """All packets of a node, or those of one direction."""
    rank, ways = random.randrange(network.size), random.choice([["-s", "-d"], ["-s"], ["-d"]])
    network.cut(rank, ways)
    injection.moment = f"node {rank}, {' and '.join({'-s': 'from it', '-d': 'to it'}[way] for way in ways)}"


KINDS = (
    Kind("network cut, no Ray", partial(inject, cut, True, False)),
    Kind("network away for 1 to 5 s, no Ray", partial(inject, away, False, False)),
    Kind("network loses 2 to 20 %, no Ray", partial(inject, partial(lossy, LOSS[1]), False, False)),
    Kind("network of 64 to 1024 kbit/s, no Ray", partial(inject, partial(slow, RATE[0]), False, False)),
    Kind("network cut", partial(inject, cut, True, True)),
    Kind("network loses 2 to 5 %", partial(inject, partial(lossy, 0.05), False, True)),
    Kind("network of 2 to 32 Mbit/s", partial(inject, partial(slow, 2000), False, True)),
)
