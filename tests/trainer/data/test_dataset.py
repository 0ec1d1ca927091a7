"""Prompts from Parquet files: lengths, refusals, the token cache, and custom dataset classes."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.config.custom_code import CustomCode
from trainer.config.data import DataConfig
from trainer.data import dataset
from trainer.data.arithmetic import write_arithmetic
from trainer.data.dataset import PromptDataset, open_dataset
from trainer.errors import ConfigError, DataError
from trainer.models.small import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["How many are 1 + 2? #### 3"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arithmetic(tmp_path_factory.mktemp("data"), 40, 4, max_number=9, dropped_carries=0.5, seed=0)[0]


def write(path: Path, **columns: list[Any]) -> Path:
    row = {
        "data_source": ["here"],
        "prompt": [[{"role": "user", "content": "How many are 1 + 2?"}]],
        "reward_model": [{"style": "rule", "ground_truth": "3"}],
        "extra_info": [{"split": "train", "index": 0}],
    }
    chosen = {name: values for name, values in {**row, **columns}.items() if values}
    pq.write_table(pa.table(chosen), path)
    return path


def test_a_prompt_is_the_templated_question_with_the_columns_for_its_reward(file: Path, tokenizer: Any) -> None:
    prompts = PromptDataset([file], tokenizer, DataConfig(max_prompt_length=128))
    row = pq.read_table(file).to_pylist()[3]
    assert len(prompts) == 40
    assert tokenizer.decode(prompts[3].token_ids) == f"<|user|>{row['extra_info']['question']}<|assistant|>"
    assert prompts[3].ground_truth == row["reward_model"]["ground_truth"]
    assert prompts[3].data_source == "slipway/arithmetic"
    assert prompts[3].extra_info["answer"] == row["extra_info"]["answer"]


def test_files_are_read_one_after_the_other(file: Path, tokenizer: Any) -> None:
    prompts = PromptDataset([file, file], tokenizer, DataConfig(max_prompt_length=128))
    assert len(prompts) == 80
    assert prompts[41].token_ids == prompts[1].token_ids
    assert prompts[41].index == 41


def test_a_long_prompt_is_refused_dropped_or_truncated(file: Path, tokenizer: Any) -> None:
    whole = PromptDataset([file], tokenizer, DataConfig(max_prompt_length=128))
    lengths = [len(whole[index].token_ids) for index in range(len(whole))]
    limit = sorted(lengths)[20]

    def limited(way: str) -> PromptDataset:
        return PromptDataset([file], tokenizer, DataConfig(max_prompt_length=limit, overlong_prompts=way))

    first = next(index for index, length in enumerate(lengths) if length > limit)
    with pytest.raises(DataError) as caught:
        limited("error")
    assert f"{file}, row {first}: the prompt has {lengths[first]} tokens, data.max_prompt_length is {limit}" in str(
        caught.value
    )
    assert "data.overlong_prompts=filter" in caught.value.hint
    assert len(limited("filter")) == sum(length <= limit for length in lengths)
    assert limited("truncate_left")[first].token_ids == whole[first].token_ids[-limit:]
    assert limited("truncate_right")[first].token_ids == whole[first].token_ids[:limit]
    with pytest.raises(DataError, match="no prompt has at most 2 tokens"):
        PromptDataset([file], tokenizer, DataConfig(max_prompt_length=2, overlong_prompts="filter"))


def test_the_next_run_reads_the_cached_tokens(
    file: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DataConfig(max_prompt_length=128, cache_dir=tmp_path / "cache")
    first = PromptDataset([file], tokenizer, settings)
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "_tokenised", None)  # would fail if it were called
        again = PromptDataset([file], tokenizer, settings)
    assert [again[index] for index in range(40)] == [first[index] for index in range(40)]
    PromptDataset([file], tokenizer, settings.model_copy(update={"max_prompt_length": 100}))
    assert len(list((tmp_path / "cache").iterdir())) == 2  # other limits, another table


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"reward_model": []}, "no column reward_model; the file has data_source, prompt, extra_info"),
        ({"prompt": []}, "no column prompt"),
        (
            {"reward_model": [{"style": "rule", "ground_truth": None}]},
            "row 0: prompt or reward_model.ground_truth is empty",
        ),
        ({"prompt": ["How many?"]}, "row 0: column prompt is not a list of messages with role and content"),
        ({"prompt": [[{"text": "How many?"}]]}, "row 0: column prompt is not a list of messages"),
    ],
)
def test_wrong_columns_are_named_with_file_and_row(
    tmp_path: Path, tokenizer: Any, columns: dict[str, list[Any]], words: str
) -> None:
    path = write(tmp_path / "train.parquet", **columns)
    with pytest.raises(DataError) as caught:
        PromptDataset([path], tokenizer, DataConfig())
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.hint


def test_another_column_may_hold_the_prompt(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "train.parquet", prompt=[], messages=[[{"role": "user", "content": "Why?"}]])
    prompts = PromptDataset([path], tokenizer, DataConfig(prompt_key="messages"))
    assert prompts[0].question == "Why?"


CUSTOM = """
from trainer.data.dataset import Prompt

class Doubles:
    def __init__(self, files, tokenizer, settings):
        self.tokenizer = tokenizer

    def __len__(self):
        return 5

    def __getitem__(self, index):
        token_ids = tuple(self.tokenizer(f"{index}+{index}=")["input_ids"])
        return Prompt(index, token_ids, str(2 * index), "doubles", f"{index}+{index}")

class Words(Doubles):
    def __getitem__(self, index):
        return "a word"
"""


def test_a_custom_dataset_class(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)

    def opened(name: str) -> Any:
        return open_dataset([], tokenizer, DataConfig(custom_cls=CustomCode(path=path, name=name)))

    assert opened("Doubles")[3].ground_truth == "6"
    with pytest.raises(DataError, match="gives str, not a Prompt"):
        opened("Words")
    with pytest.raises(ConfigError) as caught:
        opened("Double")
    assert caught.value.hint == "set data.custom_cls.name=Doubles"


def test_a_tokenizer_without_a_chat_template_is_refused(file: Path) -> None:
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    tokenizer.chat_template = None
    with pytest.raises(DataError) as caught:
        PromptDataset([file], tokenizer, DataConfig(max_prompt_length=128))
    assert "the model's chat template rejects this prompt" in str(caught.value)
