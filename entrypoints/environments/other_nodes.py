"""Signs that a process which no environment understood has other nodes beside it.

A lone node has none of these variables and files. Counts of what runs on one node (`…_PER_NODE`, `LOCAL_…`) and of CPUs
are no sign, nor are the lists of servers that a program may use (`KAFKA_HOSTS`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from entrypoints.environments.host_names import is_address, is_loopback, without_number
from entrypoints.environments.process_view import ProcessView
from entrypoints.hostlist import HostlistError, expand

LIST_THEM = (
    "list the nodes with --hosts or SLIPWAY_HOSTS, the head first, or set SLIPWAY_HEAD, SLIPWAY_NODES and "
    "SLIPWAY_NODE_RANK; --single runs on this node alone"
)

_COUNT = re.compile(
    r"(?:.*_)?(?:(?:NUM|N|TOTAL)_?(?:NODES?|HOSTS?|MACHINES?)|(?:NODES?|HOSTS?|MACHINES?)_?(?:NUM|COUNT)|NHOSTS"
    r"|(?:WORKERS?|TRAINERS?)_NUM|NUM_WORKER|TOTAL_WORKERS?|TASKS?_COUNT|ARRAY_SIZE|WORLD_SIZE)|NODES"
)
_PROCESS_COUNT = re.compile(r"(?:.*_)?(?:NPROCS|NUM_PROCS|NUM_PROCESSES)")
_RANK = re.compile(
    r"(?:.*_)?(?:(?:NODE|GROUP|HOST|MACHINE|REPLICA|WORKER)_RANK|(?:REPLICA|WORKER|ROLE|ALLOC)_INDEX)|RANK"
)
_HEAD = re.compile(r"(?:[A-Z]+_)?MASTER_ADDR|(?:.*_)?RDZV_ENDPOINT|(?:JAX_)?COORDINATOR_ADDRESS")
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
    ours = {name: value for name, value in variables.items() if not _ON_ONE_NODE.search(name)}
    for name, value in ours.items():
        if _RANK.fullmatch(name) and value.strip("0").isdigit():
            hint = (
                f"pass NNODES and MASTER_ADDR into the container too; for a single node unset {name}, or use --single"
            )
            yield Sign(f"{name} is {value}, so there are other nodes, but nothing says how many", hint)
    for name, value in ours.items():
        if _HEAD.fullmatch(name) and not _is_here(view, without_number(value)) and variables.get("WORLD_SIZE") != "1":
            yield Sign(f"{name} is {value}, another host, so there are other nodes, but nothing says how many")
    for name, value in ours.items():
        if _says_several(view, name, value):
            yield Sign(f"{name} is {value!r}, so there are other nodes, but nothing that `launch` knows names them")
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


def _is_here(view: ProcessView, host: str) -> bool:
    """Whether a name or address leads to this node, from this node."""
    return host in ("0.0.0.0", "::") or is_loopback(host) or view.is_me(host)


def _says_several(view: ProcessView, name: str, value: str) -> bool:
    """Whether a variable counts more than one node, or more processes than run on one."""
    number = _number(value.rpartition(":")[2])  # of an elastic range, 1:4, the larger
    if number < 2:
        return False
    if _COUNT.fullmatch(name):
        return True
    return bool(_PROCESS_COUNT.fullmatch(name)) and number not in _numbers_of_one_node(view)


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
    found = dict.fromkeys(word for entry in words if _NAME.fullmatch(word := without_number(entry).strip("[]")))
    mine = [host for host in found if view.is_me(host)]
    others = [host for host in found if host not in mine]
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
