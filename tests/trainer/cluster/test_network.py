"""A node that others cannot reach is named, with those that cannot: from the kernel's tables of two to four nodes."""

from trainer.cluster.stalls.explanation import Asked, explain
from trainer.cluster.stalls.hosts import HostState
from trainer.cluster.stalls.network import Connections, cut_off, parse_connections
from trainer.cluster.stalls.stacks import Frame, GroupState, Standing

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
INSIDE = (
    Frame("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce"),
    Frame("/x/trainer/a.py", 3, "norm"),
    Frame("/x/trainer/cluster/workers.py", 70, "call"),
)


def ranks(count: int) -> list[Asked]:
    """A rank on each of the nodes n0, n1, …; their collectives use the addresses 10.0.0.0, 10.0.0.1, …"""
    return [Asked(f"actor rank {rank} on n{rank}", f"id{rank}", "update", None, f"n{rank}") for rank in range(count)]


def node(number: int, count: int, *silent: int, interface: bool = True, problem: str = "") -> HostState:
    """A node that is connected to all others, of which the `silent` do not acknowledge its data."""
    local = frozenset({f"10.0.0.{number}"})
    peers = frozenset(f"10.0.0.{other}" for other in range(count)) - local
    unacknowledged = tuple((f"10.0.0.{other}:5000", 6) for other in silent)
    connections = Connections(local, frozenset() if interface else local, peers, unacknowledged)
    return HostState((), (*connections.problems, *filter(None, [problem])), connections)


def waiting(begun: int = 3) -> Standing:
    return Standing("", (INSIDE,), groups=(GroupState("0", 0, 4, begun),))


def lines(hosts: list[HostState], begun: tuple[int, ...] = (), ended: int | None = None) -> tuple[str, ...]:
    asked = ranks(len(hosts))
    standings = {call: waiting(begun[rank] if begun else 3) for rank, call in enumerate(asked) if rank != ended}
    addresses = {call.address: host for call, host in zip(asked, hosts, strict=True)}
    return explain(standings, [] if ended is None else [asked[ended]], addresses).lines


def test_connections_are_read_from_the_kernel_s_table() -> None:
    listens = "   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
    local = "   1: 0100007F:1F90 0100007F:C350 01 00000400:00000000 01:00000019 00000005     0        0 2 1\n"
    quiet = "   2: 0100000A:1F90 0200000A:C350 01 00000000:00000000 00:00000000 00000000     0        0 3 1\n"
    stuck = "   3: 0100000A:1F90 0300000A:C351 01 00000400:00000000 01:00000019 00000005     0        0 4 1\n"
    connections = parse_connections(HEAD + listens + local + quiet + stuck, ["127.0.0.1", "10.0.0.9"])
    assert connections == Connections(
        frozenset({"10.0.0.1"}),
        frozenset({"10.0.0.1"}),
        frozenset({"10.0.0.2", "10.0.0.3"}),
        (("10.0.0.3:50001", 6),),
    )
    assert connections.problems == [
        "10.0.0.1 is on no interface any more, but connections use it",
        "10.0.0.3:50001 does not acknowledge data, sent 6 times",
    ]


def test_the_node_without_its_interface_is_named_with_those_that_cannot_reach_it() -> None:
    first, second = lines([node(0, 2, 1), node(1, 2, 0, interface=False)])
    assert first == (
        "actor rank 1 on n1 waits in all_reduce (distributed/distributed_c10d.py:9), called by norm (trainer/a.py:3); "
        "n0 cannot reach its node at 10.0.0.1, which is on no interface of it any more"
    )
    assert second.endswith(", for actor rank 1 on n1")


def test_of_four_nodes_the_end_of_every_silent_connection_is_named() -> None:
    first, second = lines([node(0, 4), node(1, 4, 2), node(2, 4, 3), node(3, 4, 2)])
    assert first.startswith("actor rank 2 on n2 waits in all_reduce ")
    assert first.endswith("; n1 and n3 cannot reach its node at 10.0.0.2")
    assert second.startswith("actor rank 0 on n0, and 2 more: waits in all_reduce ")


def test_a_node_whose_data_alone_is_lost_is_named() -> None:
    connections = {
        f"n{number}": host.connections for number, host in enumerate([node(0, 3, 1, 2), node(1, 3), node(2, 3)])
    }
    assert cut_off(connections) == {"n0": "its node cannot reach n1 and n2 at 10.0.0.1 and 10.0.0.2"}


def test_between_two_nodes_that_both_have_their_interface_both_are_named() -> None:
    first, second = lines([node(0, 2, 1), node(1, 2, 0)])
    assert first.startswith("actor rank 0 on n0 ")
    assert first.endswith("; n1 cannot reach its node at 10.0.0.0")
    assert second.endswith("; n0 cannot reach its node at 10.0.0.1")


def test_a_cut_explains_more_than_that_a_rank_is_behind_or_has_ended() -> None:
    cut = [node(0, 2, 1), node(1, 2, interface=False)]
    assert "n0 cannot reach its node at 10.0.0.1" in lines(cut, begun=(2, 3))[0]
    assert lines(cut, ended=1)[0] == (
        "actor rank 1 on n1 has ended its call, but n0 cannot reach its node at 10.0.0.1, "
        "which is on no interface of it any more"
    )


def test_without_a_cut_the_only_node_with_a_problem_is_named() -> None:
    first, _ = lines([node(0, 2), node(1, 2, problem="the container's CPU limit held processes back")])
    assert first.startswith("actor rank 1 on n1 waits in all_reduce ")
    assert first.endswith("; its node is the only one with a problem: the container's CPU limit held processes back")


def test_without_any_problem_all_wait_for_the_network() -> None:
    assert lines([node(0, 2), node(1, 2)])[-1] == (
        "all ranks wait in the same collective: look at the network between them"
    )
