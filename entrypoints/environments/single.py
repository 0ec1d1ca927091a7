"""A single node: used if no other environment is present, or because the user says so."""

import secrets

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.explicit import HEAD, HOST_FILE, HOSTS, NODE_RANK, NODES, SINGLE
from entrypoints.environments.host_names import host_name
from entrypoints.environments.kubernetes.kuberay import ADDRESS
from entrypoints.environments.other_nodes import LIST_THEM, signs
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

NODE_COUNT = "SLIPWAY_NODE_COUNT"
"""Tells a launch's command on how many nodes it runs. A launch in there uses the cluster of the one above."""


class Single(Environment):
    name = "single"
    last_resort = True
    precedence = 900
    title = "One node"
    reads = (SINGLE,)
    caveats = (
        "Used if nothing else is found, and refused if anything shows other nodes: a rank, a head, a count, a list or "
        "a file of hosts, a scheduler's folder. --single runs on this node alone in any environment."
    )
    run_under = "one container"
    start = "LAUNCH"
    source = "docs/design.md"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation:
        above = view.variables.get(NODE_COUNT)
        if above and view.variables.get(ADDRESS):
            return cls.alone(view, {})  # it attaches
        if above not in (None, "1"):
            raise DetectionError(
                f"this is the command of a launch on {above} nodes, which started no Ray",
                hint="leave out the --no-ray of that launch, or write --single for this node alone",
            )
        if view.variables.get(NODES, "").strip() != "1" and (sign := next(signs(view), None)):
            raise DetectionError(sign.text, sign.hint)
        head = view.variables.get(HEAD, "").strip()
        if head and head != "localhost" and not view.is_me(host_name(head, HEAD)):
            raise DetectionError(f"{HEAD} is {head}, so there are other nodes, but nothing says how many", LIST_THEM)
        return cls.alone(view, {})

    @classmethod
    def on_purpose(cls, view: ProcessView) -> Allocation | None:
        """The allocation of this node alone if the user asks for it, whatever a scheduler says; else None.

        Raises DetectionError if another of the user's variables names more nodes.
        """
        reader = Reader(view.variables)
        chosen = reader.text(SINGLE)
        if chosen in (None, "0"):
            return None
        if chosen != "1":
            raise DetectionError(f"{SINGLE} is {chosen!r}, not 1 or 0")
        others = [name for name in (HOSTS, HOST_FILE, HEAD, NODE_RANK) if view.variables.get(name)]
        if view.variables.get(NODES, "1") != "1":
            others.append(NODES)
        if others:
            raise DetectionError(
                f"{SINGLE} is 1, but {others[0]} is {view.variables[others[0]]!r}",
                hint=f"unset {SINGLE} or {others[0]}",
            )
        return cls.alone(view, reader.used)

    @classmethod
    def alone(cls, view: ProcessView, variables: dict[str, str]) -> Allocation:
        """The allocation of this node alone."""
        return Allocation(
            environment=cls.name,
            job_id=secrets.token_hex(4),  # no peer needs it, but two jobs on one host must differ
            node_count=1,
            node_rank=0,
            hosts=(view.hostname,),
            head=view.hostname,
            variables=variables,
        )
