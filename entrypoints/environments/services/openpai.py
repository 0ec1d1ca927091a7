"""OpenPAI: the task roles of a job, in order; the first task of the first role is the head."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

ROLE = "PAI_CURRENT_TASK_ROLE_NAME"
INDEX = "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX"
ROLES = "PAI_TASK_ROLE_LIST"
JOB = "PAI_JOB_NAME"

_HINT = "OpenPAI sets it in every container"


class OpenPai(Environment):
    name = "openpai"
    precedence = 385
    title = "OpenPAI"
    reads = (ROLE, INDEX, ROLES, "PAI_TASK_ROLE_TASK_COUNT_<ROLE>", "PAI_HOST_IP_<ROLE>_<INDEX>", JOB)
    caveats = "The index counts within one task role. The nodes are all roles in the order of PAI_TASK_ROLE_LIST."
    start = "commands of every task role: LAUNCH"
    source = "https://openpai.readthedocs.io/en/latest/manual/cluster-user/how-to-use-advanced-job-settings.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        role = reader.text(ROLE)
        if role is None:
            return None
        roles = [name.strip() for name in reader.required(ROLES, hint=_HINT).split(",")]
        if role not in roles:
            raise DetectionError(f"{ROLE} is {role}, which is not in {ROLES}={','.join(roles)}", hint=_HINT)
        counts = [reader.required_number(f"PAI_TASK_ROLE_TASK_COUNT_{name}", hint=_HINT) for name in roles]
        hosts = [
            reader.required_host(f"PAI_HOST_IP_{name}_{index}", hint=_HINT)
            for name, count in zip(roles, counts, strict=True)
            for index in range(count)
        ]
        return Allocation(
            environment=cls.name,
            job_id=reader.text(JOB) or hosts[0],
            node_count=len(hosts),
            node_rank=sum(counts[: roles.index(role)]) + reader.required_number(INDEX, hint=_HINT),
            head=hosts[0],  # several tasks may run on one machine, so the addresses are no list of nodes
            variables=reader.used,
        )
