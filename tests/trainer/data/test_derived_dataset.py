"""Datasets derived from verl's class, as `data.custom_cls` names them."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from trainer.config.custom_code import CustomCode
from trainer.config.sections.data import DataConfig
from trainer.data.arithmetic import write_arithmetic
from trainer.data.dataset import PromptDataset, open_dataset
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
    found = open_dataset([train], tokenizer, settings(tmp_path, body))
    plain = PromptDataset([train], tokenizer, DataConfig(max_prompt_length=128))
    assert len(found) == 3
    assert [found[index].token_ids for index in range(3)] == [plain[index].token_ids for index in range(3)]
    assert found[0].ground_truth == plain[0].ground_truth


def test_a_subclass_that_reads_nothing_is_told_what_to_set(tmp_path: Path, tokenizer: Any) -> None:
    train, *_ = write_arithmetic(tmp_path, 8, 2, 9, 0.5, 0)
    with pytest.raises(DataError, match="sets no self"):
        open_dataset([train], tokenizer, settings(tmp_path, "pass"))
