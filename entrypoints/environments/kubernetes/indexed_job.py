"""A Kubernetes Job with completionMode Indexed: an index, a host name, and no size.

The head is `<job>-0.<subdomain>`, which resolves only with a headless Service. The pod's full name tells job and
subdomain.
"""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.explicit import HEAD, NODES
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.environments.services.table import Kubeflow
from entrypoints.errors import DetectionError

INDEX = "JOB_COMPLETION_INDEX"

SET_THE_SIZE = f"no variable tells the size: set --nodes, or env: [{{name: {NODES}, value: '2'}}]"
HEADLESS_SERVICE = """the pods need names: add a headless Service and name it in the pod template
  apiVersion: v1
  kind: Service
  metadata: {name: JOB}
  spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {job-name: JOB}}
and in the Job: spec.template.spec.subdomain: JOB"""


class IndexedJob(Environment):
    name = "indexed_job"
    precedence = 550
    title = "Kubernetes Indexed Job"
    reads = (INDEX, NODES, HEAD, "host name", "/etc/hosts")
    caveats = (
        "No variable tells the size: set --nodes. The head's name needs a headless Service. Set its "
        "publishNotReadyAddresses, or name servers cache that an early name is unknown. With hostNetwork the pods have "
        "their nodes' names: set SLIPWAY_HEAD to the first pod's, and dnsPolicy to ClusterFirstWithHostNet."
    )
    start = "command: LAUNCH   # completionMode: Indexed, subdomain: SERVICE, env SLIPWAY_NODES"
    source = "https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        index = pod_index(view, reader)
        if index is None:
            return None
        count = reader.required_number(NODES, hint=SET_THE_SIZE)
        head = reader.host(HEAD)
        if head is not None:  # with hostNetwork the host name is the node's, even if it happens to end in the index
            return Allocation(
                environment=cls.name, job_id=head, node_count=count, node_rank=index, head=head, variables=reader.used
            )
        name, subdomain = pod_name(view, reader)
        job = name.removesuffix(f"-{index}")
        if job == name:
            raise DetectionError(
                f"{INDEX} is {index}, but this pod is called {name}",
                hint=f"set {HEAD} to the first pod's name; with hostNetwork: true also set dnsPolicy: "
                "ClusterFirstWithHostNet, so that the name is known",
            )
        if subdomain is None and count > 1:
            raise DetectionError(
                f"the other pods of {job} have no resolvable names", hint=HEADLESS_SERVICE.replace("JOB", job)
            )
        return Allocation(
            environment=cls.name,
            job_id=job,
            node_count=count,
            node_rank=index,
            hosts=tuple(f"{job}-{rank}.{subdomain}" for rank in range(count)) if subdomain and count < 10_000 else None,
            head=f"{job}-0.{subdomain}" if subdomain else view.hostname,
            variables=reader.used,
        )


def pod_index(view: ProcessView, reader: Reader) -> int | None:
    """This pod's index; None without one, and if Kubeflow's trainer built the Job and nobody else tells the size."""
    if view.variables.get(Kubeflow.count[0]) and not view.variables.get(NODES):
        return None
    return reader.number(INDEX)


def pod_name(view: ProcessView, reader: Reader) -> tuple[str, str | None]:
    """This pod's host name and its subdomain, which is in /etc/hosts; None without a subdomain."""
    reader.used["hostname"] = view.hostname
    full = view.hostname if "." in view.hostname else view.fully_qualified() or view.hostname
    name, _, domain = full.partition(".")
    subdomain = re.sub(r"\.svc\..*$", "", domain)  # pods of this namespace resolve the short form too
    return name, subdomain or None
