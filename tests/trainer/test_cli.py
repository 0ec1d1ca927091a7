"""The command line: output streams, exit codes, and errors without a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.overrides import settings
from trainer.config.trees import TREES


def trainer(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_warm_started_model_loads_in_transformers(tmp_path: Path) -> None:
    made = trainer("data", "arithmetic", "--train", "64", "--validation", "16", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    tuned = trainer("sft", "steps=2", "output=model", cwd=tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    assert tuned.stdout.strip() == "model"
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; M.from_pretrained('model');"
        "t = T.from_pretrained('model'); print(t.decode(t('7 + 5')['input_ids']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("7 + 5")


RUN_COMMANDS = ("report", "top", "samples", "export", "verify", "replay")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["train", "actor.learning_rte=1"], 2, "did you mean actor.learning_rate=VALUE?"),
        (["train", "model.path=nowhere"], 3, "nowhere"),
        (["sft"], 3, "data/demonstrations.parquet: no such file"),
        (["data", "gsm8k", "--from", "nowhere.parquet"], 3, "nowhere.parquet: no such file"),
        *(([command, "runs/nope"], 3, "runs/nope: no such run") for command in RUN_COMMANDS),
        (["train", "model.path=m", "trainer.resume=/nope"], 2, "trainer.resume=/nope: no such directory"),
        (["dpo", "model.path=m", "trainer.resume=/nope"], 2, "trainer.resume=/nope: no such directory"),
        (["nothing"], 2, "No such command"),
    ],
)
def test_bad_input_is_one_message_with_its_own_exit_code(
    tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    done = trainer(*arguments, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_exist_is_named_with_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first" / "checkpoints").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name, words in (
        ("runs/frist", "hint: did you mean runs/first?"),
        ("runs/nope", "hint: name the directory of a run; runs has first"),
        ("model", "error: model: not the directory of a run"),
    ):
        assert words in trainer("samples", name, cwd=tmp_path).stderr
    resumed = trainer("train", "model.path=model", "trainer.resume=runs/first", cwd=tmp_path)
    assert "trainer.resume=auto trainer.run_id=first" in resumed.stderr
    curve = trainer("report", "runs/first", "runs/first", "--curve", "curve.png", cwd=tmp_path)
    assert (curve.returncode, "--curve shows one run" in curve.stderr) == (2, True)


def test_config_prints_the_resolved_tree(tmp_path: Path) -> None:
    done = trainer("config", "trainer.seed=7", cwd=tmp_path)
    assert json.loads(done.stdout)["trainer"]["seed"] == 7


def test_config_explains_every_setting(tmp_path: Path) -> None:
    done = trainer("config", "--fields", cwd=tmp_path)
    explained = [line.partition("=")[0] for line in done.stdout.splitlines() if line[:1] not in (" ", "{", "}")]
    known = [setting.key for tree in TREES.values() for setting in settings(tree)]
    assert explained == list(dict.fromkeys(known))
    assert {"actor.learning_rate", "dpo.beta", "kto.desirable_weight", "sft.max_length", "steps"} <= {*explained}


def test_settings_are_checked_without_importing_heavy_packages(tmp_path: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from trainer.cli import app;"
        "done = CliRunner().invoke(app, ['config', '--check', '--config', 'verl', 'trainer.nnodes=2']);"
        "assert done.exit_code == 0, done.output;"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
