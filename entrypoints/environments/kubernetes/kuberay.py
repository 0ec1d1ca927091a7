"""KubeRay: the pods form a Ray cluster already, so the command only attaches to it."""

import re
from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import without_number
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError
from entrypoints.host.network.interfaces import bracketed

HEAD = ("FQ_RAY_IP", "RAY_IP")
ADDRESS = "RAY_ADDRESS"
CLUSTER = "RAY_CLUSTER_NAME"
AUTO, LOCAL = "auto", "local"
"""Ray's words for the cluster that runs on this host, and for a new one."""
_PORT = "6379"
_CLUSTER = re.compile(r"(?:ray://)?(?:\[[^\[\]]*:[^\[\]]*\]|[^:/\s]+):\d{1,5}")


class KubeRay(Environment):
    name = "kuberay"
    precedence = 110
    title = "KubeRay (attach)"
    reads = (ADDRESS, *HEAD, CLUSTER)
    caveats = (
        "The operator starts Ray in every pod, so `launch` only runs the command against that cluster. RAY_ADDRESS has "
        "the same effect in every environment except your own list."
    )
    start = "kubectl exec HEAD_POD -- LAUNCH   # or a RayJob with entrypoint: LAUNCH"
    source = "https://docs.ray.io/en/latest/cluster/kubernetes/user-guides/config.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        head = reader.host(*HEAD)
        cluster = reader.text(CLUSTER)
        if head is None and cluster is None:
            return None
        port = view.variables.get("RAY_PORT") or _PORT
        reader.text(ADDRESS)
        attach = cluster_address(view.variables) or (f"{bracketed(head)}:{port}" if head else None)
        if attach is None:
            return None
        return Allocation(
            environment=cls.name,
            job_id=cluster or attach,
            node_count=1,  # the cluster has more nodes, but the command runs here only
            node_rank=0,
            head=head or without_number(attach),
            attach=attach,
            variables=reader.used,
        )


def cluster_address(variables: Mapping[str, str]) -> str | None:
    """The cluster that the user wants to use, from RAY_ADDRESS; None if it is unset, or `local`: a new cluster.

    Raises DetectionError for the address of a dashboard, which `ray job submit` reads from the same variable, and for
    a text that is no address.
    """
    address = variables.get(ADDRESS, "").strip()
    if address in ("", LOCAL):
        return None
    if address.startswith(("http://", "https://")):
        raise DetectionError(
            f"{ADDRESS} is {address}, a dashboard's address, at which no command can join the cluster",
            hint=f"set {ADDRESS} to the cluster's own address, like HOST:{_PORT}, or unset it to form a cluster",
        )
    scheme = address.partition("://")[0] if "://" in address else ""
    if address != AUTO and scheme in ("", "ray") and not _CLUSTER.fullmatch(address):
        raise DetectionError(
            f"{ADDRESS} is {address!r}, not the address of a Ray cluster",
            hint=f"write HOST:{_PORT}, or unset it to form a cluster",
        )
    return address
