"""The variables of torchrun, which Kubeflow's trainers and many job templates set too.

- `PET_*`: torchrun's options as variables (Kubeflow Trainer v2); they count nodes.
- `NNODES` or `NUM_NODES`, `NODE_RANK`, `MASTER_ADDR`: the usual hand-written template; they count nodes.
- `GROUP_RANK`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `WORLD_SIZE`: torchrun sets them for its workers; WORLD_SIZE counts
  processes. PyTorchJob and PAI-DLC count **nodes** in RANK and WORLD_SIZE, so these two count only together with
  LOCAL_RANK and LOCAL_WORLD_SIZE. If all are set, they must not contradict the others: https://pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import is_address, is_loopback
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

NODE_COUNT = ("PET_NNODES", "NNODES", "NUM_NODES")
NODE_RANK = ("PET_NODE_RANK", "NODE_RANK", "GROUP_RANK")
HEAD = ("PET_MASTER_ADDR", "MASTER_ADDR")
OF_PROCESSES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
JOB_ID = ("PET_RDZV_ID", "TORCHELASTIC_RUN_ID")

_NAME_THE_NODES = "set NNODES, NODE_RANK and MASTER_ADDR, or SLIPWAY_HOSTS and SLIPWAY_NODE_RANK"

_OTHER_NAME = (
    "MASTER_ADDR is {head} here; the other nodes find this one only if theirs is {name}: otherwise set the same "
    "MASTER_ADDR on all nodes, or the same --control-port"
)


class Torchrun(Environment):
    name = "torchrun"
    precedence = 600
    title = "torchrun-style variables"
    reads = (*NODE_COUNT, *NODE_RANK, *HEAD, *OF_PROCESSES)
    caveats = (
        "RANK and WORLD_SIZE may count nodes or processes, so they need LOCAL_RANK and LOCAL_WORLD_SIZE beside them."
    )
    start = "NNODES=2 NODE_RANK=0 MASTER_ADDR=gpu-0 LAUNCH   # on each node, with its rank"
    source = "https://pytorch.org/docs/stable/elastic/run.html#environment-variables"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        layout = _by_nodes(reader)
        if layout is not None:
            _refuse_contradiction(layout, reader, view.variables)
        else:
            layout = _by_processes(reader)
        if layout is None:
            return None
        node_count, node_rank = layout
        head = reader.host(*HEAD)
        if head is None:
            if node_count > 1:
                raise DetectionError(f"{' and '.join(HEAD)} are not set for {node_count} nodes", hint=_NAME_THE_NODES)
            head = view.hostname
        job_id = reader.text(*JOB_ID)
        name = _short(view.hostname if is_loopback(head) else head)
        unsure = job_id is None and is_loopback(head) and node_rank == 0 and node_count > 1
        return Allocation(
            environment=cls.name,
            job_id=job_id or f"{name}:{view.variables.get('MASTER_PORT', '')}",
            node_count=node_count,
            node_rank=node_rank,
            head=head,
            warnings=(_OTHER_NAME.format(head=head, name=name),) if unsure else (),
            variables=reader.used,
        )


def _short(host: str) -> str:
    """The name without its domain, which some nodes may leave out; an address as it is."""
    return host if is_address(host) else host.partition(".")[0]


def _by_nodes(reader: Reader) -> tuple[int, int] | None:
    """Node count and node rank from variables that count nodes; None if they are unset."""
    if reader.text(*NODE_COUNT) is None:
        return None
    count = reader.number(*NODE_COUNT) or 0
    rank = reader.number(*NODE_RANK) if count == 1 else reader.required_number(*NODE_RANK, hint=_NAME_THE_NODES)
    return count, rank or 0


def _by_processes(reader: Reader) -> tuple[int, int] | None:
    """The same from variables that count processes."""
    size = reader.number("WORLD_SIZE")
    rank = reader.number("RANK")
    if size is None or (size == 1 and not rank):
        return None
    local_rank = reader.number("LOCAL_RANK")
    local_size = reader.number("LOCAL_WORLD_SIZE")
    if rank is None or local_rank is None or not local_size:
        raise DetectionError(
            f"WORLD_SIZE is {size}, which may count nodes or processes without RANK, LOCAL_RANK and LOCAL_WORLD_SIZE",
            hint=_NAME_THE_NODES,
        )
    if size % local_size:
        raise DetectionError(f"WORLD_SIZE is {size}, not a multiple of LOCAL_WORLD_SIZE {local_size}")
    group_rank = reader.number("GROUP_RANK")
    node_rank = rank // local_size if group_rank is None else group_rank
    return size // local_size, node_rank


def _refuse_contradiction(by_nodes: tuple[int, int], reader: Reader, variables: Mapping[str, str]) -> None:
    """Raise DetectionError if the variables of torchrun's workers tell another place than those that count nodes.

    RANK and WORLD_SIZE may count nodes too: then they equal the others. Nodes with unequal numbers of processes are
    not compared.
    """
    if not all(variables.get(name) for name in OF_PROCESSES):
        return
    other = Reader(variables)
    rank, size, _, local_size = (other.number(name) or 0 for name in OF_PROCESSES)
    if (size, rank) == by_nodes or (local_size and size % local_size):
        return
    by_processes = _by_processes(other)
    if by_processes is not None and by_processes != by_nodes:
        raise DetectionError(
            f"this is node {_told(reader, by_nodes)}, but also node {_told(other, by_processes)}",
            hint=f"unset the variables that are wrong, or {_NAME_THE_NODES}",
        )


def _told(reader: Reader, layout: tuple[int, int]) -> str:
    """`1 of 2`, and the variables that were read."""
    variables = " ".join(f"{name}={value}" for name, value in reader.used.items())
    return f"{layout[1]} of {layout[0]} ({variables})"
