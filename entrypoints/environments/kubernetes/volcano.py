"""Volcano jobs (plug-ins svc and env), and Huawei's ModelArts, which sets the same variables.

Each kind of task has its own list, VC_<TASK>_HOSTS, and its own numbering, VC_TASK_INDEX. The job's nodes are all lists
together, starting with the task called master, head, leader, launcher or chief.
"""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import in_file
from entrypoints.environments.process_view import ProcessView, Reader, distinct, rank_of
from entrypoints.errors import DetectionError

INDEX = ("VC_TASK_INDEX", "VK_TASK_INDEX")
_TASK = re.compile(r"VC_(.+)_(?:HOSTS|NUM)")
_FIRST = re.compile(r"MASTER|HEAD|LEADER|LAUNCHER|CHIEF")
_FOLDER = "/etc/volcano"


class Volcano(Environment):
    name = "volcano"
    precedence = 510
    title = "Volcano, ModelArts"
    reads = (INDEX[0], "VC_<TASK>_HOSTS", "/etc/volcano/<task>.host")
    caveats = "VC_TASK_INDEX counts within one kind of task. With several kinds, the pod's name decides."
    start = "command of every task: LAUNCH   # plugins: {svc: [], env: []}"
    source = "https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_env_plugin.md"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        tasks = sorted({match[1] for name in view.variables if (match := _TASK.fullmatch(name))}, key=_order)
        if not tasks:
            return None
        reader = Reader(view.variables)
        index = reader.number(*INDEX)
        lists = [_hosts(view, reader, task) for task in tasks]
        hosts = distinct([host for listed in lists for host in listed])
        if len(lists) > 1 or index is None:
            index = rank_of(view, hosts, "+".join(f"VC_{task}_HOSTS" for task in tasks))
            reader.used["hostname"] = view.hostname
        return Allocation(
            environment=cls.name,
            job_id=hosts[0],
            node_count=len(hosts),
            node_rank=index,
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )


def _order(task: str) -> tuple[bool, str]:
    return not _FIRST.search(task), task


def _hosts(view: ProcessView, reader: Reader, task: str) -> tuple[str, ...]:
    """The hosts of one kind of task: from the variable, else from the file, which follows changes of scale."""
    path = f"{_FOLDER}/{task.lower().replace('_', '-')}.host"
    hosts = reader.hosts(f"VC_{task}_HOSTS") or in_file(view.lines(path) or [], path)
    if not hosts:
        raise DetectionError(f"neither VC_{task}_HOSTS nor {path} lists a host", hint="use Volcano's plug-in svc")
    return hosts
