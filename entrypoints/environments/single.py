"""One node, on its own: what is left when nothing else is there."""

import secrets
from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment


class Single(Environment):
    name = "single"

    @classmethod
    def detect(cls, _variables: Mapping[str, str], hostname: str) -> Allocation:
        return Allocation(
            environment=cls.name,
            job_id=secrets.token_hex(4),  # nobody else needs to know it, but two jobs on one host must differ
            node_count=1,
            node_rank=0,
            hosts=(hostname,),
            head=hostname,
            variables={},
        )
