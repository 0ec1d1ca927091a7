"""Files of prompts are checked before anything starts: no cluster is needed to refuse them."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.pairs import write_preferences
from trainer.config.dpo import DpoConfig
from trainer.config.kto import KtoConfig
from trainer.config.sft import SftConfig
from trainer.config.tree import Config
from trainer.data.arithmetic import write_arithmetic
from trainer.data.formats.schema import write_table
from trainer.errors import ConfigError, DataError
from trainer.runs.offline.dpo import train_on_preferences
from trainer.runs.offline.kto import train_on_labels
from trainer.runs.offline.sft import fine_tune
from trainer.runs.ppo import train

DATASET = """
from trainer.data.dataset import Prompt

class Dataset:
    def __init__(self, files, tokenizer, settings): pass
    def __len__(self): return 3
    def __getitem__(self, index): return Prompt(index, (1, 2), "3", "mine" if index else "gsm8k", "1 + 2?")
"""


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


def settings(model: Path, tmp_path: Path, **data: Any) -> dict[str, Any]:
    return {"model": {"path": model}, "data": data, "trainer": {"output_dir": tmp_path / "runs"}}


def refused(config: Config, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        train(config)
    assert not config.trainer.output_dir.exists()


def test_prompts_that_are_too_long(model: Path, tmp_path: Path) -> None:
    prompts, _, held_out = write_arithmetic(tmp_path, 8, 8, 9, 0.5, 0)
    given = settings(model, tmp_path, train_files=[prompts], validation_files=[held_out], max_prompt_length=2)
    refused(Config.model_validate(given), DataError, r"row 0: the prompt has \d+ tokens, data.max_prompt_length is 2")


def test_a_source_without_a_rule(model: Path, tmp_path: Path) -> None:
    prompt = {"prompt": [{"role": "user", "content": "1 + 2?"}], "reward_model": {"ground_truth": "3"}}
    file = tmp_path / "train.parquet"
    write_table([{"data_source": "mine", **prompt}], file)
    given = settings(model, tmp_path, train_files=[file], validation_files=[file])
    refused(Config.model_validate(given), ConfigError, r"train\.parquet: 'mine' \(1 prompts\)")


def test_a_source_without_a_rule_in_a_dataset_of_the_user(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DATASET)
    given = settings(model, tmp_path, custom_cls={"path": tmp_path / "mine.py", "name": "Dataset"})
    refused(Config.model_validate(given), ConfigError, r"mine\.py: 'mine' \(4 prompts\)")


def test_pairs_that_are_too_long(model: Path, tmp_path: Path) -> None:
    pairs, held_out = write_preferences(tmp_path, 8, 8, max_number=9, seed=0)
    given = settings(model, tmp_path, train_files=[pairs], validation_files=[held_out], max_prompt_length=2)
    with pytest.raises(DataError, match=r"row 0: the prompt has \d+ tokens"):
        train_on_preferences(DpoConfig.model_validate(given))
    assert not (tmp_path / "runs").exists()


def test_a_batch_of_more_rows_than_there_are(model: Path, tmp_path: Path) -> None:
    prompts, _, held_out = write_arithmetic(tmp_path, 8, 8, 9, 0.5, 0)
    files = {"train_files": [prompts], "validation_files": [held_out], "max_prompt_length": 128}
    given = settings(model, tmp_path, **files, train_batch_size=100_000)
    rows = {"mini_batch_size": 1000}
    config = Config.model_validate(given | {"actor": rows, "critic": rows})
    refused(config, DataError, "data.train_batch_size=100000: a step would repeat the 8 rows")
    pairs, held_out = write_preferences(tmp_path, 8, 8, max_number=9, seed=0)
    files = {"train_files": [pairs], "validation_files": [held_out], "max_prompt_length": 128}
    given = settings(model, tmp_path, **files, train_batch_size=9)
    with pytest.raises(DataError, match=r"data\.train_batch_size=9: a step would repeat the 8 rows"):
        train_on_preferences(DpoConfig.model_validate(given))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["train_files", "validation_files"])
def test_a_setting_that_names_no_file(name: str, model: Path, tmp_path: Path) -> None:
    given = {"train_files": [tmp_path / "rows"], "validation_files": [tmp_path / "rows"]} | {name: []}
    whole = settings(model, tmp_path, **given)
    refused(Config.model_validate(whole), DataError, f"data.{name} names no file")
    starts: list[Any] = [(DpoConfig, train_on_preferences), (KtoConfig, train_on_labels)]
    if name == "train_files":  # fine-tuning needs no held-out rows
        starts.append((SftConfig, fine_tune))
    for kind, start in starts:
        with pytest.raises(DataError, match=f"data.{name} names no file") as caught:
            start(kind.model_validate(whole))
        assert f"data.{name}=FILE" in caught.value.hint
    assert not (tmp_path / "runs").exists()
