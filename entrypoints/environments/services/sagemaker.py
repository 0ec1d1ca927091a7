"""Amazon SageMaker training jobs, HyperPod's managed ones too: `algo-1`, `algo-2` …

All nodes must agree on an order. Hosts are sorted by number, while SageMaker's own tools sort them as text (`algo-10`
before `algo-2`).
"""

import json
import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import host_name
from entrypoints.environments.process_view import ProcessView, Reader, rank_of
from entrypoints.errors import DetectionError

HOSTS = "SM_HOSTS"
CURRENT = "SM_CURRENT_HOST"
JOB = ("TRAINING_JOB_NAME", "SAGEMAKER_JOB_NAME")
CONFIG = "/opt/ml/input/config/resourceconfig.json"


class SageMaker(Environment):
    name = "sagemaker"
    precedence = 300
    title = "Amazon SageMaker"
    reads = (CONFIG, HOSTS, CURRENT, JOB[0])
    caveats = "Hosts are sorted by number, not as text: algo-2 comes before algo-10."
    start = "ContainerEntrypoint: LAUNCH"
    source = "https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        cluster = _from_variables(reader) or _from_file(view, reader)
        if cluster is None:
            return None
        hosts, current = cluster
        ordered = tuple(sorted((host_name(host, HOSTS, number=True) for host in hosts), key=_natural))
        me = ProcessView(variables={}, hostname=current, root=view.root)
        return Allocation(
            environment=cls.name,
            job_id=reader.text(*JOB) or ordered[0],
            node_count=len(ordered),
            node_rank=rank_of(me, ordered, HOSTS),
            hosts=ordered,
            head=ordered[0],
            variables=reader.used,
        )


def _from_variables(reader: Reader) -> tuple[list[str], str] | None:
    text = reader.text(HOSTS)
    if text is None:
        return None
    return _names(HOSTS, text), reader.required(CURRENT, hint="the SageMaker training toolkit sets it")


def _from_file(view: ProcessView, reader: Reader) -> tuple[list[str], str] | None:
    lines = view.lines(CONFIG)
    if lines is None:
        return None
    try:
        document = json.loads("\n".join(lines))
        hosts, current = document["hosts"], document["current_host"]
    except (ValueError, KeyError, TypeError) as error:
        raise DetectionError(f"{CONFIG} lacks hosts and current_host, or is not JSON") from error
    reader.used |= {CONFIG: f"current_host={current}"}
    return _names(CONFIG, json.dumps(hosts)), str(current)


def _names(source: str, text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise DetectionError(f"{source} is {text!r}, not a JSON list of host names")
    return names


def _natural(host: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]
