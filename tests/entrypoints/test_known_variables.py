"""Misspelt variables of launch are refused, and no variable of the project is."""

import re

import pytest

from entrypoints.errors import UsageError
from entrypoints.known_variables import OF_LAUNCH, OF_OTHERS, PREFIX, refuse_unknown
from tests.entrypoints.conftest import REPOSITORY, Start


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HOST", "HOSTS"), ("NNODES", "NODES"), ("NUM_NODES", "NODES"), ("RANK", "NODE_RANK"),
        ("NODERANK", "NODE_RANK"), ("HOST_FILE", "HOSTFILE"), ("TOKENFILE", "TOKEN_FILE"), ("PORT", "CONTROL_PORT"),
        ("HCA", "HCAS"), ("JOBDIR", "JOB_DIR"), ("DEADLNE", "DEADLINE"),
    ],
)  # fmt: skip
def test_an_unknown_variable_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"^SLIPWAY_{name} is not a variable of launch$") as refused:
        refuse_unknown({PREFIX + name: "a,b", "SLIPWAY_TOKEN": "x"})
    assert refused.value.hint.startswith(f"did you mean SLIPWAY_{meant}? ")


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(UsageError) as refused:
        refuse_unknown({"SLIPWAY_MASTER_ADDR": "a"})
    assert refused.value.hint == "`launch --help` lists the variables"


def test_kubernetes_may_have_services_of_that_name() -> None:
    links = {
        "SERVICE_HOST": "10.96.0.9", "SERVICE_PORT": "6379", "SERVICE_PORT_GCS": "6379", "PORT": "tcp://10.96.0.9:6379",
        "PORT_6379_TCP": "tcp://10.96.0.9:6379", "PORT_6379_TCP_PROTO": "tcp", "PORT_6379_TCP_PORT": "6379",
        "PORT_6379_TCP_ADDR": "10.96.0.9",
    }  # fmt: skip
    refuse_unknown({f"SLIPWAY_{name}": value for name, value in links.items()})
    refuse_unknown({f"SLIPWAY_HEAD_{name}": value for name, value in links.items()})
    with pytest.raises(UsageError):
        refuse_unknown({"SLIPWAY_CTRL_PORT": "6379"})


def names_in(*folders: str) -> set[str]:
    files = [
        path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", "", ".toml")
    ]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())
    return {name for text in texts for name in re.findall(r"SLIPWAY_([A-Z_]*[A-Z])\b", text)}


def test_every_variable_of_launch_and_trainer_is_known() -> None:
    assert names_in("entrypoints", "trainer", "images") == set(OF_LAUNCH)


def test_every_variable_of_the_other_programs_is_known() -> None:
    assert names_in("buildkit", "ci", "benchmarks") <= {*OF_LAUNCH, *OF_OTHERS}


@pytest.mark.parametrize("arguments", [["explain"], ["preflight"], ["--no-ray", "--", "echo", "ran"]])
def test_a_misspelt_list_of_hosts_runs_nothing(start: Start, arguments: list[str]) -> None:
    ended = start(*arguments, SLIPWAY_HOST="a,b").wait()
    assert (ended.status, ended.stdout) == (2, "")
    assert "error: SLIPWAY_HOST is not a variable of launch" in ended.stderr
    assert "hint: did you mean SLIPWAY_HOSTS?" in ended.stderr
