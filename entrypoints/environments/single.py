"""A single node: used if no other environment is present."""

import secrets

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView
from entrypoints.errors import DetectionError

RANKS = ("NODE_RANK", "PET_NODE_RANK", "GROUP_RANK", "RANK")
"""One of these above 0 shows that there are other nodes, even if the other variables are missing."""


class Single(Environment):
    name = "single"
    last_resort = True
    precedence = 900
    title = "One node"
    reads = ()
    caveats = "Used if nothing else is found. If you expected several nodes, check `launch explain`."
    run_under = "one container"
    start = "LAUNCH"
    source = "docs/design.md"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation:
        for name in RANKS:
            if view.variables.get(name, "").strip("0").isdigit():
                raise DetectionError(
                    f"{name} is {view.variables[name]}, so there are other nodes, but nothing says how many",
                    hint=f"pass NNODES and MASTER_ADDR into the container too; for a single node unset {name}",
                )
        return Allocation(
            environment=cls.name,
            job_id=secrets.token_hex(4),  # no peer needs it, but two jobs on one host must differ
            node_count=1,
            node_rank=0,
            hosts=(view.hostname,),
            head=view.hostname,
            variables={},
        )
