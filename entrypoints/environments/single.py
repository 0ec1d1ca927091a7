"""One node, on its own: what is left when nothing else is there."""

import secrets

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.place import Place


class Single(Environment):
    name = "single"
    title = "One node"
    reads = ()
    beware = "Taken when nothing else is found: look at `launch explain` if you expected several nodes."
    run_under = "one container"
    start = "LAUNCH"
    source = "docs/design.md"

    @classmethod
    def detect(cls, place: Place) -> Allocation:
        return Allocation(
            environment=cls.name,
            job_id=secrets.token_hex(4),  # nobody else needs to know it, but two jobs on one host must differ
            node_count=1,
            node_rank=0,
            hosts=(place.hostname,),
            head=place.hostname,
            variables={},
        )
