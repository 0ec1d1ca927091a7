"""One node, on its own: what is left when nothing else is there."""

import secrets

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView
from entrypoints.errors import DetectionError

RANKS = ("NODE_RANK", "PET_NODE_RANK", "GROUP_RANK", "RANK")
"""What a node of several would have, though the rest of its variables be lost."""


class Single(Environment):
    name = "single"
    last_resort = True
    precedence = 900
    title = "One node"
    reads = ()
    beware = "Taken when nothing else is found: look at `launch explain` if you expected several nodes."
    run_under = "one container"
    start = "LAUNCH"
    source = "docs/design.md"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation:
        for name in RANKS:
            if view.variables.get(name, "").strip("0").isdigit():
                raise DetectionError(
                    f"{name} is {view.variables[name]}, so there are other nodes, but nothing says how many",
                    hint=f"hand NNODES and MASTER_ADDR into the container too; for a node on its own unset {name}",
                )
        return Allocation(
            environment=cls.name,
            job_id=secrets.token_hex(4),  # nobody else needs to know it, but two jobs on one host must differ
            node_count=1,
            node_rank=0,
            hosts=(view.hostname,),
            head=view.hostname,
            variables={},
        )
