"""Datasets derived from verl's class, as `data.custom_cls` names them."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.config.custom_code import CustomCode
from trainer.config.sections.data import DataConfig
from trainer.data.arithmetic import write_arithmetic
from trainer.data.dataset import PromptDataset, open_dataset
from trainer.data.derived_dataset import RLHFDataset
from trainer.errors import DataError
from trainer.models.small import build_tokenizer


def settings(tmp_path: Path, body: str) -> DataConfig:
    code = tmp_path / "mine.py"
    code.write_text(
        "from verl.utils.dataset import RLHFDataset\nimport pyarrow.parquet as pq\n\n"
        f"class Mine(RLHFDataset):\n    def _read_files_and_tokenize(self):\n{textwrap.indent(body, ' ' * 8)}\n"
    )
    return DataConfig(max_prompt_length=128, custom_cls=CustomCode(path=code, name="Mine"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["How many are 1 + 2? #### 3"])


@pytest.fixture(autouse=True)
def _aliases_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "images" / "aliases"))


def test_a_subclass_reads_its_files_itself(tmp_path: Path, tokenizer: Any) -> None:
    train, *_ = write_arithmetic(tmp_path, 8, 2, 9, 0.5, 0)
    body = "self.dataframe = pq.read_table(self.data_files[0]).to_pylist()[:3]"
    dataset = open_dataset([train], tokenizer, settings(tmp_path, body))
    plain = PromptDataset([train], tokenizer, DataConfig(max_prompt_length=128))
    assert len(dataset) == 3
    assert [dataset[index].token_ids for index in range(3)] == [plain[index].token_ids for index in range(3)]
    assert dataset[0].ground_truth == plain[0].ground_truth


def test_a_subclass_that_reads_nothing_is_told_what_to_set(tmp_path: Path, tokenizer: Any) -> None:
    train, *_ = write_arithmetic(tmp_path, 8, 2, 9, 0.5, 0)
    with pytest.raises(DataError, match="sets no self"):
        open_dataset([train], tokenizer, settings(tmp_path, "pass"))


ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many are 1 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([{}, {"agent_name": "tool_agent", "extra_info": {"index": 3}}], [("", {}), ("tool_agent", {"index": 3})]),
        ([{"extra_info": {}}], [("", {})]),
        ([{"extra_info": {"a": 1}}, {"extra_info": {"a": "b"}}], [("", {"a": 1}), ("", {"a": "b"})]),
        ([{"extra_info": {"a": np.array([1, 2]), "b": (np.int64(3),)}}], [("", {"a": [1, 2], "b": [3]})]),
    ],
)
def test_rows_need_not_have_the_same_columns_or_types(
    tokenizer: Any, more: list[dict[str, Any]], expected: list[tuple[str, dict[str, Any]]]
) -> None:
    class Mine(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.dataframe = [{**ROW, **columns} for columns in more]

    dataset = Mine([], tokenizer, DataConfig(max_prompt_length=128))
    assert [(dataset[index].agent_name, dataset[index].extra_info) for index in range(len(dataset))] == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, {"data_source": "mine"}], "Mine, row 1: no column prompt, reward_model"),
        ([ROW, {**ROW, "extra_info": 5}], "Mine, row 1: column extra_info is int"),
        ([], "Mine: there are no rows"),
        ([5], "Mine, row 0: 5 is not an object with columns"),
    ],
)
def test_a_wrong_row_is_named(tokenizer: Any, rows: list[Any], message: str) -> None:
    class Mine(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.dataframe = rows

    with pytest.raises(DataError, match=message):
        Mine([], tokenizer, DataConfig(max_prompt_length=128))
