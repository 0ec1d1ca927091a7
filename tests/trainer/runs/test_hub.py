"""A run whose model and data are of a hub, which gets the trained model back; the hub is a stand-in."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from tests.trainer.fake_hub import fake_hub

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The hub's repositories: a model, gated and not, and GSM8K with eight rows."""
    folder = tmp_path_factory.mktemp("hub")
    rows = [{"question": f"How many are {number} + 1?", "answer": f"#### {number + 1}"} for number in range(8)]
    for split in ("train", "test"):
        path = folder / "openai" / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    for owner in ("family", "gated"):
        shutil.copytree(model, folder / owner / "small")
    return folder


@pytest.fixture(scope="module")
def hub(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with fake_hub(folder, tmp_path_factory.mktemp("cache")) as variables:
        yield variables


@pytest.fixture(scope="module")
def run(hub: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that named everything as the hub does."""
    output = tmp_path_factory.mktemp("runs")
    settings = {
        "model.path": "family/small",
        "data.train_files": "openai/gsm8k",
        "data.validation_files": "openai/gsm8k",
        "data.max_prompt_length": 256,
        "data.train_batch_size": 4,
        "rollout.samples_per_prompt": 2,
        "rollout.engine": "transformers",
        "actor.mini_batch_size": 8,
        "algorithm.advantage": "grpo",
        "algorithm.kl_coefficient": 0,
        "trainer.total_steps": 1,
        "trainer.output_dir": output,
        "trainer.run_id": "named",
    }
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as temporary:
        done = trainer(
            {**hub, "RAY_TMPDIR": temporary}, "train", *(f"{key}={value}" for key, value in settings.items())
        )
    assert done.returncode == 0, done.stderr
    return output / "named"


def trainer(variables: Mapping[str, str], *arguments: object) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "RAY_ADDRESS")}
    return subprocess.run(
        [sys.executable, "-m", "trainer", *map(str, arguments)],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )


def test_a_trained_model_goes_to_the_hub_with_its_card(run: Path, hub: dict[str, str], folder: Path) -> None:
    done = trainer({**hub, "HF_TOKEN": "right"}, "export", run, "--push-to-hub", "me/trained")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(run / "models" / "step_000001"), f"{hub['HF_ENDPOINT']}/me/trained"]
    pushed = folder / "me" / "trained"
    card = (pushed / "README.md").read_text()
    assert "base_model: family/small\n" in card
    assert "| base model | family/small |" in card
    assert "vllm serve me/trained" in card
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (pushed, run / "models" / "step_000001")
    )
    assert all(ours[name].equal(weight) for name, weight in theirs.items())


@pytest.mark.parametrize(
    ("token", "options", "status", "message", "hint"),
    [
        ("wrong", ("--push-to-hub", "me/x"), 3, "--push-to-hub me/x: this account may not write to it", "set HF_TOKEN"),
        (
            "",
            ("--push-to-hub", "me/x"),
            3,
            "--push-to-hub me/x: a user without a token may not write to it",
            "HF_TOKEN",
        ),
        ("right", ("--push-to-hub", "x"), 2, "--push-to-hub x: not a name like OWNER/NAME", "name the owner, too"),
        ("right", ("--private",), 2, "--private changes nothing without --push-to-hub", "add --push-to-hub OWNER/NAME"),
    ],
)
def test_a_model_that_cannot_be_pushed_is_one_message(
    run: Path,
    hub: dict[str, str],
    folder: Path,
    token: str,
    options: tuple[str, ...],
    status: int,
    message: str,
    hint: str,
) -> None:
    done = trainer({**hub, **({"HF_TOKEN": token} if token else {})}, "export", run, *options)
    assert done.returncode == status, done.stderr
    assert f"error: {message}" in done.stderr
    assert hint in done.stderr.partition("hint: ")[2]
    assert "Traceback" not in done.stderr
    assert not (folder / "me" / "x").exists()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "gated/small",
            "the model is gated, and a user without a token may not read it",
            "/gated/small, then set HF_TOKEN",
        ),
        ("no/small", "no such model on the hub, or a private one", "check the name"),
    ],
)
def test_a_model_that_cannot_be_read_is_one_message(hub: dict[str, str], name: str, message: str, hint: str) -> None:
    done = trainer(hub, "train", f"model.path={name}", "data.train_files=openai/gsm8k")
    assert done.returncode == 3, done.stderr
    assert f"error: model.path={name}: no such directory, and {message}" in done.stderr
    assert hint in done.stderr.partition("hint: ")[2]
    assert "Traceback" not in done.stderr
