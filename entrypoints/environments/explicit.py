"""The user names the nodes: a list of hosts with the head first, or the head, the number of nodes and the rank.

A list may use Slurm's short form (`gpu-[0-3]`), and IPv6 addresses in brackets or without. A host file has one host per
line, as for MPI; slots (`slots=8`, `:8`) and comments are ignored.
"""

import hashlib

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import host_name, in_file, in_list
from entrypoints.environments.process_view import ProcessView, Reader, rank_of
from entrypoints.errors import DetectionError

JOB_ID = "SLIPWAY_JOB_ID"
HOSTS = "SLIPWAY_HOSTS"
HOST_FILE = "SLIPWAY_HOSTFILE"
HEAD = "SLIPWAY_HEAD"
NODES = "SLIPWAY_NODES"
NODE_RANK = "SLIPWAY_NODE_RANK"

SINGLE = "SLIPWAY_SINGLE"
PLACE = (HOSTS, HOST_FILE, HEAD, NODES, NODE_RANK, SINGLE)
"""The user's settings of one launch's nodes. Its command does not inherit them."""
ALL_THREE = f"set all of {HEAD}, {NODES} and {NODE_RANK}, or list the nodes in {HOSTS}"


class Explicit(Environment):
    name = "explicit"
    precedence = 100
    job_id_variable = JOB_ID
    title = "Your own list"
    reads = (HOSTS, HOST_FILE, NODE_RANK, HEAD, NODES)
    caveats = "Give every node the same list. A host that is not in it is refused."
    run_under = "two containers"
    start = "SLIPWAY_HOSTS=gpu-[0-1] LAUNCH   # on each host, by ssh or docker run"
    source = "docs/design.md"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        hosts = _hosts(view, reader)
        rank = reader.number(NODE_RANK)
        if hosts is None:
            return _by_number(reader, view, rank)
        source = next(iter(reader.used))
        if rank is None:
            rank = rank_of(view, hosts, source)
            reader.used["hostname"] = view.hostname
        elif (place := view.place_in(hosts)) not in (None, rank):
            raise DetectionError(
                f"{NODE_RANK} is {rank}, but {source} has {view.hostname} as node {place}",
                hint=f"unset {NODE_RANK}, as the host name tells the rank, or set another --hostname",
            )
        if rank >= len(hosts):
            raise DetectionError(
                f"{NODE_RANK} is {rank}, but {source} lists {len(hosts)} hosts, ranks 0 to {len(hosts) - 1}"
            )
        return Allocation(
            environment=cls.name,
            job_id=_job_id(view, ",".join(hosts)),
            node_count=len(hosts),
            node_rank=rank,
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )


def _hosts(view: ProcessView, reader: Reader) -> tuple[str, ...] | None:
    if text := reader.text(HOSTS):
        return in_list(text, HOSTS)
    path = reader.text(HOST_FILE)
    if path is None:
        return None
    lines = view.lines(path)
    if lines is None:
        raise DetectionError(f"{HOST_FILE} is {path}, which cannot be read here", hint="mount it into the container")
    hosts = in_file(lines, HOST_FILE)
    if not hosts:
        raise DetectionError(f"{HOST_FILE} is {path}, which lists no host")
    return hosts


def _by_number(reader: Reader, view: ProcessView, rank: int | None) -> Allocation | None:
    """The allocation from head, number of nodes and rank. Without a rank, the others only supplement an environment."""
    if rank is None:
        return None
    head = host_name(reader.required(HEAD, hint=ALL_THREE), HEAD)
    return Allocation(
        environment=Explicit.name,
        job_id=_job_id(view, head),
        node_count=reader.required_number(NODES, hint=ALL_THREE),
        node_rank=rank,
        head=head,
        variables=reader.used,
    )


def _job_id(view: ProcessView, nodes: str) -> str:
    """The user's id, else one that follows from the nodes: a scheduler's may be known to some of them only."""
    return view.variables.get(JOB_ID) or hashlib.sha256(nodes.lower().encode()).hexdigest()[:8]
