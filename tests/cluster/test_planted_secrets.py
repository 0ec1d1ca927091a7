"""Secrets are planted in the environment of jobs; then every file and process list is searched for them.

Only the environment of a process may hold one. The search reads whatever a job wrote: run directory, certificate,
`stall.html`, loggers, report, `preflight.json`, logs of `launch` and Ray, temporary files.
"""

import io
import json
import secrets
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = Any  # conftest.Job

IN_ADDRESSES = ("UV_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "https_proxy")  # passwords
PLANTED = (
    *("SLIPWAY_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "OPENAI_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "SLIPWAY_REGISTRY_PASSWORD", "MY_SECRET"),
    *IN_ADDRESSES,
    "DECOY",  # which the job writes into a file and a command line, to show that the search finds it
)

STATUSES = {"train": 0, "verify": 0, "report": 0, "train without data": 3, "explain": 0, "preflight": 15}
TRAIN_AND_SEARCH = Path(__file__).with_name("train_and_search.py")


def planted() -> dict[str, str]:
    """A secret by the name of its variable."""
    return {name: f"planted-{secrets.token_hex(16)}" for name in PLANTED}


def environment(values: dict[str, str]) -> dict[str, str]:
    """The variables of a job; some are addresses with a password."""
    addresses = {name: f"http://me:{values[name]}@proxy.invalid:3128" for name in IN_ADDRESSES}
    return {**values, **addresses, "NO_PROXY": "*", "no_proxy": "*"}


def test_no_secret_of_the_environment_is_in_a_file_or_a_process_list(job: Callable[..., Job]) -> None:
    values = planted()
    reports = {"SLIPWAY_LOG_DIR": "/tmp/work/logs", "SLIPWAY_REPORT_DIR": "/tmp/work/reports", "WANDB_MODE": "offline"}
    backwards = json.dumps({name: value[::-1] for name, value in values.items()})
    node = job(1, **environment(values), **reports, REVERSED=backwards)
    node.start(0, "--", "python", "-c", TRAIN_AND_SEARCH.read_text())
    assert node.wait(300) == {"node0": 0}, node.outputs()
    output = node.output("node0")
    assert not [name for name, value in values.items() if value in output]
    result = json.loads(output.split("RESULT ")[1].splitlines()[0])
    assert result["statuses"] == STATUSES, result["log"]
    assert set(result["written"]) > {"stall.html", "certificate.json", "report.html", "preflight.json", "node0-node0"}
    assert result["searched"] > 100
    assert result["processes"] > 10  # different command lines
    assert sorted(result["found"]) == [
        "DECOY in decoy, directory of mode 755",
        "DECOY in the process list",
        "RAY_AUTH_TOKEN in attach.json, directory of mode 700",  # `launch attach` reads it
    ]


def test_no_secret_is_in_what_two_nodes_leave_behind(job: Callable[..., Job]) -> None:
    """Logs of `launch` and of Ray are copied at the end of a job, here one that fails."""
    values = planted()
    nodes = job(2, **environment(values), SLIPWAY_LOG_DIR="/tmp/logs")
    for rank in (0, 1):
        nodes.start(rank, "--tls", "--", "sh", "-c", "echo running; sleep 15; echo $DECOY >/tmp/logs/decoy; exit 3")
    lists, end = set[str](), time.monotonic() + 120
    while time.monotonic() < end and any(is_running(container) for container in nodes.containers.values()):
        for container in nodes.containers.values():
            if is_running(container):
                lists |= {words for _, words in container.top(ps_args="-eo pid,args")["Processes"]}
        time.sleep(0.5)
    assert nodes.wait(1) == {"node0": 3, "node1": 3}, nodes.outputs()
    texts = {"the output": nodes.outputs().encode(), "the process list": "\n".join(lists).encode()}
    for name, container in nodes.containers.items():
        content = b"".join(container.get_archive("/tmp")[0])
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            files = [file for file in archive if file.isfile()]
            texts |= {f"{name}:{file.name}": archive.extractfile(file).read() for file in files}  # type: ignore[union-attr]
    assert [name for name in texts if name.startswith("node1:tmp/logs/")], list(texts)
    assert "raylet" in texts["the process list"].decode()
    places = [f"{name} in {place}" for place, text in texts.items() for name in values if values[name].encode() in text]
    assert places == ["DECOY in node0:tmp/logs/decoy"]


def is_running(container: Any) -> bool:
    container.reload()
    return bool(container.status == "running")
