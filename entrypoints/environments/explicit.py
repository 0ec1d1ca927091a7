"""The user lists the hosts: `--hosts` or `SLIPWAY_HOSTS`, the head first."""

import hashlib
from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment, Reader
from entrypoints.errors import DetectionError

HOSTS = "SLIPWAY_HOSTS"
NODE_RANK = "SLIPWAY_NODE_RANK"


class Explicit(Environment):
    name = "explicit"

    @classmethod
    def detect(cls, variables: Mapping[str, str], hostname: str) -> Allocation | None:
        reader = Reader(variables)
        text = reader.text(HOSTS)
        if text is None:
            return None
        hosts = tuple(host.strip() for host in text.split(","))
        if not all(hosts):
            raise DetectionError(f"{HOSTS} is {text!r}: a host name is empty", hint=f"write {HOSTS}=head,worker-1")
        if repeated := {host for host in hosts if hosts.count(host) > 1}:
            raise DetectionError(f"{HOSTS} is {text!r}: {min(repeated)} is listed twice")
        rank = reader.number(NODE_RANK)
        if rank is None:
            rank = _rank_by_name(hosts, hostname)
            reader.used["hostname"] = hostname
        if rank >= len(hosts):
            raise DetectionError(
                f"{NODE_RANK} is {rank}, but {HOSTS} lists {len(hosts)} hosts, ranks 0 to {len(hosts) - 1}"
            )
        return Allocation(
            environment=cls.name,
            job_id=variables.get("SLURM_JOB_ID") or hashlib.sha256(",".join(hosts).encode()).hexdigest()[:8],
            node_count=len(hosts),
            node_rank=rank,
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )


def _rank_by_name(hosts: tuple[str, ...], hostname: str) -> int:
    """Find this node in the list by its full name, else by an unambiguous short name."""
    if hostname in hosts:
        return hosts.index(hostname)
    short = hostname.split(".")[0]
    matches = [rank for rank, host in enumerate(hosts) if host.split(".")[0] == short]
    if len(matches) != 1:
        raise DetectionError(
            f"this host is {hostname}, which is {'ambiguous' if matches else 'not'} in {HOSTS}={','.join(hosts)}",
            hint=f"say which of them it is with --node-rank or {NODE_RANK} (0 to {len(hosts) - 1})",
        )
    return matches[0]
