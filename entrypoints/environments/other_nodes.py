"""Evidence of a multi-node job under an unknown scheduler.

A lone node has none of these variables and files. Counts of what runs on one node (`…_PER_NODE`, `LOCAL_…`) and of CPUs
are no sign, nor are the lists of servers that a program may use (`KAFKA_HOSTS`).
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from entrypoints.environments.host_names import is_address, is_loopback, without_number
from entrypoints.environments.local_rank import local_rank_variable
from entrypoints.environments.process_view import ProcessView
from entrypoints.hostlist import HostlistError, expand

LIST_THEM = (
    "list the nodes with --hosts or SLIPWAY_HOSTS, the head first, or set SLIPWAY_HEAD, SLIPWAY_NODES and "
    "SLIPWAY_NODE_RANK; --single runs on this node alone"
)

_NODES = {"NODE", "HOST", "MACHINE", "POD", "INSTANCE", "REPLICA", "MEMBER", "PEER", "CONTAINER"}
_TASKS = {"WORKER", "TRAINER", "JOB", "TASK", "ROLE", "ALLOC", "GROUP", "PROCESS", "PROC", "CROSS"}
_INDICES = {"RANK", "INDEX", "IDX", "ORDINAL", "PROCID", "NODEID", "RANKID", "PROCNO"}
_ALONE = _INDICES - {"INDEX", "IDX", "ORDINAL"}
"""These number processes of a job whatever stands before them."""
_COUNTS = {"COUNT", "NUM", "TOTAL", "NUMBER", "SIZE"}
_GLUED_COUNT = re.compile(
    r"(?:N|NUM|TOTAL)(NODE|HOST|MACHINE|TASK|PROC|RANK|WORKER)S?|(NODE|HOST|MACHINE)(?:NUM|COUNT)"
)
_SETS_OF_TASKS = {"WORLD", "COMM", "ARRAY", "CLUSTER", "GANG"}
"""Their sizes count a job's tasks."""
_OF_JOBS = _NODES | _TASKS | _SETS_OF_TASKS | {"RANK"}
_NO_TASKS = {
    *("GPU", "CPU", "CORE", "THREAD", "DEVICE", "SLOT", "POOL", "CACHE", "QUEUE", "BUFFER", "PAGE", "SHARD", "CHUNK"),
    *("BATCH", "LAYER", "TENSOR", "MATRIX", "EXPERT", "LORA", "QLORA", "DORA", "PEFT", "ADAPTER", "SAMPLE", "SERVICE"),
}
"""Words of variables that number or count anything else."""
_TESTS = ("CI_", "CIRCLE_", "BUILDKITE_", "GITHUB_", "GITLAB_", "SEMAPHORE_", "DRONE_", "GTEST_", "PYTEST_", "TEST_")
"""Prefixes of systems that run parallel tests, each on its own."""
_HEAD = re.compile(
    r"(?:[A-Z]+_)?MASTER_ADDR|(?:.*_)?(?:RDZV|RENDEZVOUS)_ENDPOINT|(?:.*_)?COORDINATOR_ADDR(?:ESS)?|(?:.*_)?PRIMARY_ADDR"
    r"|(?:.*_)?(?:LEADER|CHIEF)_(?:ADDR|ADDRESS|HOST|HOSTNAME|IP|ENDPOINT|NODE)|.*_LEADER"
)
_NO_HOST = {"true", "false", "yes", "no", "none", "self"}
_LIST = re.compile(
    r"(?:.*_)?(?:NODE_?LIST|HOST_?LIST|NODES?_IPS|HOST_?NAMES|(?:WORKER|NODE|JOB|TASK|MPI|ALL|PEER|CLUSTER)S?_HOSTS)"
)
_PERHAPS_A_LIST = re.compile(r"(?:.*_)?(?:HOSTS|NODES|IPS|ADDRS|ADDRESSES|ENDPOINTS|PEERS|WORKERS|MACHINES)")
"""These count only if they list this node too."""
_FILE = re.compile(r"(?:.*_)?(?:HOST|NODE|MACHINE)S?_?FILE")
_ON_ONE_NODE = re.compile(r"LOCAL|PER_NODE|PER_HOST|PER_MACHINE|PER_WORKER|^SLIPWAY_")
_SIZE_OF_ONE_NODE = re.compile(r"LOCAL.*SIZE|PER_(?:NODE|HOST|MACHINE|WORKER)")
_OTHERS_HOSTS = re.compile(r"(?:.*_)?(?:ALLOWED|TRUSTED|KNOWN|PERMITTED|INSECURE|BLOCKED|EXTRA)_.*")
"""Lists of hosts that a server or a client may talk to."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*|[0-9.]+\.[0-9]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")
_ORDINAL = re.compile(r".*-([1-9]\d*)")
"""The name of a pod of a StatefulSet, or of an Indexed Job without its variables, other than the first."""

_MANAGERS = {
    "PMIX_RANK": "a PMIx server",
    "PMI_RANK": "a PMI process manager",
    "PMI_FD": "a PMI process manager",
    "PMI_PORT": "a PMI process manager",
}
_PLACES = {
    "/var/spool/slurmd": "Slurm; start the task with srun, and pass SLURM_* into the container",
    "/run/flux/local": "Flux; start the task with flux run, and pass FLUX_* into the container",
    "/var/spool/pbs/aux": "PBS; pass PBS_* into the container",
    "/var/spool/torque/aux": "Torque; pass PBS_* into the container",
    "/etc/volcano": "Volcano; use its plug-ins svc and env",
    "/etc/mpi/hostfile": "an MPIJob's launcher; start the tasks with mpirun",
    "/job/hostfile": "DeepSpeed's host file; give it to --hostfile",
}
"""Files, folders and sockets of schedulers, each with the scheduler and what to do."""


@dataclass(frozen=True)
class Sign:
    """Something that shows other nodes: what it is, and what to do."""

    text: str
    hint: str = LIST_THEM


def signs(view: ProcessView) -> Iterator[Sign]:
    """The signs of other nodes, the most telling first."""
    variables = {name: text.strip() for name, text in sorted(view.variables.items()) if text.strip()}
    if name := local_rank_variable(variables):
        yield Sign(f"{name} is {variables[name]}, so this is not the node's first task, but nothing tells its job")
    ours = {name: value for name, value in variables.items() if not _ON_ONE_NODE.search(name)}
    numbers = [number for name, value in ours.items() if (number := _parse(name, value)) is not None]
    for number in numbers:
        if number.is_index and number.value > 0 and number.of_tasks:
            name = number.name
            hint = (
                f"pass NNODES and MASTER_ADDR into the container too; for a single node unset {name}, or use --single"
            )
            yield Sign(f"{name} is {number.value}, so there are other nodes, but nothing says how many", hint)
    for name, value in ours.items():
        if _HEAD.fullmatch(name) and not _is_here(view, value) and variables.get("WORLD_SIZE") != "1":
            yield Sign(f"{name} is {value}, another host, so there are other nodes, but nothing says how many")
    for number in numbers:
        if not number.is_index and number.value > 1 and _counts_nodes(view, number):
            value = ours[number.name]
            yield Sign(
                f"{number.name} is {value!r}, so there are other nodes, but no variable that `launch` reads names them"
            )
    for index, count in itertools.product(numbers, numbers):
        if index.is_index and not count.is_index and _belong_together(index, count):
            yield Sign(
                f"{index.name} is {index.value} of {count.name} {count.value}, so there are other nodes, but no "
                "variable that `launch` reads names them"
            )
    for name, value in ours.items():
        if (hosts := _hosts(view, name, value)) and len(hosts) > 1:
            yield Sign(f"{name} lists {len(hosts)} hosts ({', '.join(hosts[:4])}{', …' if len(hosts) > 4 else ''})")
        elif _FILE.fullmatch(name) and (text := _of_file(view, value)):
            yield Sign(f"{name} is {value}, {text}")
    if (
        "KUBERNETES_SERVICE_HOST" in variables
        and (match := _ORDINAL.fullmatch(view.hostname))
        and view.fully_qualified()
    ):
        yield Sign(f"this pod is {view.hostname} of a headless service, so there are pods 0 to {match[1]} at least")
    for name, manager in _MANAGERS.items():
        if name in variables:
            yield Sign(
                f"{name} is {variables[name]!r}: {manager} started this task, and nothing says how many there are"
            )
    for path, scheduler in _PLACES.items():
        if view.place(path).exists():
            kind, _, advice = scheduler.partition("; ")
            yield Sign(f"{path} belongs to {kind}, whose variables are missing here", f"{advice}; {LIST_THEM}")


@dataclass(frozen=True)
class _Number:
    """A variable that numbers or counts: `ACME_JOB_INDEX` numbers (`ACME`, `JOB`)."""

    name: str
    value: int
    is_index: bool
    stem: tuple[str, ...]
    """The words before and after the word that tells the kind, in the singular."""
    kind: str
    """The word that tells it."""

    @property
    def of_tasks(self) -> bool:
        """Whether the name alone says that it is of a job's nodes or tasks."""
        last = self.stem[-1] if self.stem else ""
        return self.kind in _ALONE or (last in _NODES | _TASKS and self.kind != "ID")


def _parse(name: str, text: str) -> _Number | None:
    """The variable as an index or a count of something; None if it is neither."""
    value = _number(text.rpartition(":")[2])  # of an elastic range, 1:4, the larger
    words = [_singular(word) for word in name.upper().split("_") if word]
    if not words or not text[-1:].isdigit() or name.startswith(_TESTS) or name.upper().endswith("NPROC"):
        return None
    *before, last = words
    if before[-1:] and before[-1] in _NO_TASKS:
        return None
    if last in _INDICES or (last == "ID" and before and before[-1] in _NODES | _TASKS):
        return _Number(name, value, True, tuple(before), last)
    if glued := _GLUED_COUNT.fullmatch(last):
        return _Number(name, value, False, (*before, glued[1] or glued[2]), last)
    if last in _COUNTS:
        return _Number(name, value, False, tuple(before), last)
    if before and before[-1] in ("NUM", "N", "TOTAL"):
        return _Number(name, value, False, (*before[:-1], last), before[-1])
    return _Number(name, value, False, ("NODE",), "") if name.upper() == "NODES" else None


def _singular(word: str) -> str:
    """`PROCESS` of `PROCESSES`, `NODE` of `NODES`."""
    if word.endswith("SSES"):
        return word.removesuffix("ES")
    return word if word.endswith("SS") or len(word) < 3 else word.removesuffix("S")


def _counts_nodes(view: ProcessView, count: _Number) -> bool:
    """Whether a count alone shows several nodes, or more processes than run on one."""
    word = count.stem[-1] if count.stem else ""
    if count.kind == "SIZE":
        return word in _SETS_OF_TASKS
    if word in _NODES or (word == "TASK" and count.kind == "COUNT"):
        return True
    if word in ("WORKER", "TRAINER"):  # NUM_WORKERS are mostly a program's own
        return not count.name.upper().endswith(("NUM_WORKERS", "N_WORKERS", "WORKER_COUNT", "WORKERS_COUNT"))
    return word in ("PROC", "PROCESS") and count.value not in _numbers_of_one_node(view)


def _belong_together(index: _Number, count: _Number) -> bool:
    """Whether two variables of one system say `index of count`: SNOWFLAKE_JOB_INDEX and SNOWFLAKE_JOBS_COUNT."""
    if not (count.value > 1 and index.value <= count.value and index.stem and count.stem):
        return False
    same = index.stem[0] == count.stem[0] and {*index.stem[1:], *count.stem[1:]} <= _OF_JOBS
    return same and (index.kind in _ALONE or index.stem[-1] in _OF_JOBS)


def _is_here(view: ProcessView, text: str) -> bool:
    """Whether a name or address leads to this node, from this node. A text that is no host leads nowhere else."""
    host = without_number(text)
    if host.isdigit() or host.lower() in _NO_HOST:
        return True
    return host in ("0.0.0.0", "::") or is_loopback(host) or view.is_me(host)


def _numbers_of_one_node(view: ProcessView) -> set[int]:
    """Counts that a process count may equal on a single node: its CPUs, and what other variables count per node."""
    cpus = sum(line.startswith("processor") for line in view.lines("/proc/cpuinfo") or ())
    return {cpus, *(_number(text) for name, text in view.variables.items() if _SIZE_OF_ONE_NODE.search(name))}


def _number(text: str) -> int:
    """The text as a number; 0 if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _hosts(view: ProcessView, name: str, value: str) -> list[str]:
    """The hosts that a variable lists, each once; empty if it is no list of the job's nodes."""
    surely = _LIST.fullmatch(name)
    if not (surely or _PERHAPS_A_LIST.fullmatch(name)) or _OTHERS_HOSTS.fullmatch(name):
        return []
    try:
        words = expand(value) if re.search(r"\[\d", value) and ":" not in value else re.split(r"[,;\s\"']+", value)
    except HostlistError:
        return []
    distinct = dict.fromkeys(word for entry in words if _NAME.fullmatch(word := without_number(entry).strip("[]")))
    mine = [host for host in distinct if view.is_me(host)]
    others = [host for host in distinct if host not in mine]
    families = [[host for host in others if is_address(host) and (":" in host) == ipv6] for ipv6 in (False, True)]
    names = [host for host in others if not is_address(host)]  # an IPv4 and an IPv6 address may be one host
    return [*mine[:1], *names, *max(families, key=len)] if surely or mine else []


def _of_file(view: ProcessView, path: str) -> str:
    """A clause on a host file of several hosts, or one that cannot be read; empty for one host."""
    if path == "/etc/hosts":
        return ""
    lines = view.lines(path)
    if lines is None:
        return "which cannot be read here: mount it into the container"
    hosts = dict.fromkeys(without_number(line.split("#")[0].split()[0]) for line in lines if line.split("#")[0].strip())
    return f"which lists {len(hosts)} hosts" if len(hosts) > 1 else ""
