"""Files of prompts are checked before anything starts: no cluster is needed to refuse them."""

from pathlib import Path
from typing import Any

import pytest

from trainer.config.dpo import DpoConfig
from trainer.config.tree import Config
from trainer.data.arithmetic import write_arithmetic, write_preferences
from trainer.data.formats.schema import write_table
from trainer.errors import ConfigError, DataError
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.runs.offline.dpo import train_on_preferences
from trainer.runs.ppo import train

DATASET = """
from trainer.data.dataset import Prompt

class Dataset:
    def __init__(self, files, tokenizer, settings): pass
    def __len__(self): return 3
    def __getitem__(self, index): return Prompt(index, (1, 2), "3", "mine" if index else "gsm8k", "1 + 2?")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, path)
    return path


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
