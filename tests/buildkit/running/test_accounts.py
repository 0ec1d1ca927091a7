"""A job gets its user's accounts by name, and a cache of the Hugging Face Hub that outlives the container."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from buildkit.cli import app
from buildkit.commands.job import make_cache
from buildkit.errors import RunError, UsageError
from buildkit.running.accounts import account_flags
from buildkit.running.flags import RunRequest
from buildkit.running.formats import TEMPLATED, TEXTS
from buildkit.running.slurm import CONTAINERS

SECRETS = {"HF_TOKEN": "hf_Secret123", "WANDB_API_KEY": "wbSecret456", "MLFLOW_TRACKING_PASSWORD": "mlSecret789"}
GIVEN = {**SECRETS, "HF_ENDPOINT": "https://mirror.example.com"}
IN_SLURM = [f"slurm:{container}" for container in CONTAINERS]
INHERITED = ("apptainer", "slurm:apptainer", "slurm:pyxis", "slurm:none")
"""These runtimes start the container with all variables of the shell or step."""


def invoke(home: Path, *arguments: str, **variables: str) -> Result:
    unset = dict.fromkeys(name for name in os.environ if name.startswith(("HF_", "WANDB_", "MLFLOW_", "XDG_")))
    return CliRunner().invoke(app, arguments, env={**unset, "HOME": str(home), **variables})


def printed(home: Path, shown: str, *arguments: str, **variables: str) -> str:
    if shown.startswith("slurm:"):
        command = ("slurm", "--container", shown.removeprefix("slurm:"))
    else:
        command = ("run", "--print", shown)
    done = invoke(home, *command, "--target", "cpu", *arguments, "--", "train", **variables)
    assert done.exception is None
    return done.stdout


@pytest.mark.parametrize("shown", [*TEXTS, *TEMPLATED, *IN_SLURM])
def test_accounts_are_passed_on_by_name_and_never_by_value(tmp_path: Path, shown: str) -> None:
    text = printed(tmp_path, shown, **GIVEN)
    assert not [value for value in GIVEN.values() if value in text]
    for name in GIVEN:
        assert (name in text) == (shown not in INHERITED)
    assert "HF_TOKEN" not in printed(tmp_path, shown), "variables that are not set are left out"


@pytest.mark.parametrize("shown", [*TEXTS, "compose", *IN_SLURM[:-1]])
def test_the_hubs_cache_outlives_the_container(tmp_path: Path, shown: str) -> None:
    place = f"{tmp_path}/.cache/slipway/huggingface"
    text = printed(tmp_path, shown)
    assert f"{place}:/huggingface" in text
    assert "HF_HOME=/huggingface" in text
    assert f"mkdir -p {place}" in text, "docker would create it as root"
    without = printed(tmp_path, shown, "--cache", "none")
    assert "/huggingface" not in without
    assert "HF_HOME" not in without


@pytest.mark.parametrize("shown", [*TEXTS, "compose", *IN_SLURM[:-1]])
def test_the_hosts_hf_home_is_mounted_and_not_passed_on(tmp_path: Path, shown: str) -> None:
    text = printed(tmp_path, shown, HF_HOME=f"{tmp_path}/models")
    assert f"{tmp_path}/models:/huggingface" in text
    assert f"HF_HOME={tmp_path}" not in text


def test_a_pod_reads_accounts_from_its_secret_and_the_cache_from_a_claim(tmp_path: Path) -> None:
    text = printed(tmp_path, "kubernetes", "--cache", "models", HF_TOKEN="hf_Secret123")
    assert '--from-literal=HF_TOKEN="$HF_TOKEN"' in text
    pod = next(entry for entry in yaml.safe_load_all(text) if entry["kind"] == "Job")["spec"]["template"]["spec"]
    variables = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "slipway", "key": "HF_TOKEN"}
    assert variables["HF_HOME"]["value"] == "/huggingface"
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "models"}
    assert "/huggingface" not in printed(tmp_path, "kubernetes"), "the nodes have no folder of yours"


def test_a_run_gets_them_too(tmp_path: Path) -> None:
    done = invoke(tmp_path, "run", "--target", "cpu", "--nodes", "2", "--dry-run", "--", "train", **GIVEN)
    creates = [line for line in map(shlex.split, done.stdout.splitlines()) if line[1] == "create"]
    for words in creates:
        assert set(GIVEN) <= {words[index + 1] for index, word in enumerate(words) if word == "--env"}
        assert f"{tmp_path}/.cache/slipway/huggingface:/huggingface" in words
    assert len(creates) == 2


def test_every_passed_variable_has_its_reason(tmp_path: Path) -> None:
    document = json.loads(invoke(tmp_path, "run", "--target", "cpu", "--json", **GIVEN).stdout)
    reasons = {flag["value"]: flag["reason"] for flag in document["flags"] if flag["flag"] == "--env"}
    assert set(GIVEN) <= set(reasons)
    assert "Hub" in reasons["HF_TOKEN"]


@pytest.mark.parametrize(
    ("variables", "asked", "expected"),
    [
        ({"HF_TOKEN": "a", "HF_TOKENS X": "b", "PATH": "/bin"}, (), ["HF_TOKEN"]),
        ({"HF_TOKEN": ""}, (), []),
        ({"HF_TOKEN": "a"}, ("HF_TOKEN=b",), []),
        ({"HF_HOME": "models", "HF_HUB_CACHE": "/scratch/hub", "WANDB_DIR": "./wandb"}, (), []),
        ({"MLFLOW_TRACKING_URI": "file:///runs"}, (), []),
        ({"MLFLOW_TRACKING_URI": "https://host/path"}, (), ["MLFLOW_TRACKING_URI"]),
        ({"SWANLAB_API_KEY": "a", "TRANSFORMERS_OFFLINE": "1"}, (), ["TRANSFORMERS_OFFLINE", "SWANLAB_API_KEY"]),
    ],
)
def test_what_is_passed_on(variables: dict[str, str], asked: tuple[str, ...], expected: list[str]) -> None:
    assert [flag.value for flag in account_flags(variables, asked)] == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--explain", "--cache", "/a:b"), "not a folder that can be mounted"),
        (("run", "--explain", "--cache", ""), "not a folder that can be mounted"),
        (("run", "--explain", "--cache", "/a", "--env", "HF_HOME=/b"), "--env HF_HOME"),
        (("slurm", "--container", "none", "--cache", "/a"), "--cache needs a container"),
        (("run", "--print", "kubernetes", "--cache", "./a"), "neither a folder of the nodes nor a claim"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = invoke(tmp_path, *arguments, "--target", "cpu")
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)


def test_without_a_home_there_is_no_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert "/huggingface" not in printed(tmp_path, "docker")


def test_a_run_makes_the_cache_and_says_where_it_cannot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    request = RunRequest("image", "cpu", ("train",), cache=f"{tmp_path}/a/b")
    assert make_cache(request, chosen=False) == request
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    damaged = replace(request, cache=f"{tmp_path}/file/cache")
    with pytest.raises(RunError, match=r"--cache .*/file/cache: "):
        make_cache(damaged, chosen=True)
    assert make_cache(damaged, chosen=False).cache == ""
    assert "no cache" in caplog.text
