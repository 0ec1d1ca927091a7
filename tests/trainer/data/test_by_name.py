"""Data sets that settings name as on the hub, and files whose columns do not fit: the command that makes them fit."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.fake_hub import fake_hub
from trainer.config.sections.data import DataConfig
from trainer.data.dataset import PromptDataset
from trainer.errors import DataError
from trainer.models.small import build_tokenizer

ROOT = Path(__file__).parents[3]
OURS = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?"}],
    "reward_model": {"style": "rule", "ground_truth": "8"},
}
GSM8K = {"question": "How many?", "answer": "Two times four.\n#### 8"}
# In a process of its own: the hub's client reads its variables when it is imported.
RESOLVE = """
import json, sys
from trainer.config.sft import SftConfig
from trainer.config.tree import Config
from trainer.data.published.by_name import with_local_data
from trainer.errors import DataError

given = {"data": json.loads(sys.argv[2])}
config = SftConfig.model_validate(given).for_workers() if sys.argv[1] == "sft" else Config.model_validate(given)
try:
    print(with_local_data(config).data.model_dump_json(include={"train_files", "validation_files"}))
except DataError as error:
    print(error, error.hint, sep="\\nhint: ")
"""


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a hub with GSM8K, with a data set of this trainer's rows, and with some that cannot be read."""
    folder = tmp_path / "hub"
    for split in ("train", "test"):
        write(folder / "openai" / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet", GSM8K)
        write(folder / "openai" / "gsm8k" / "socratic" / f"{split}-00000-of-00001.parquet", GSM8K)
        write(folder / "me" / "two" / "easy" / f"{split}.parquet", OURS)
        write(folder / "me" / "two" / "hard" / f"{split}.parquet", OURS)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
        write(folder / "me" / "ours" / "data" / f"{name}.parquet", OURS)
    write(folder / "me" / "plain" / "train.parquet", GSM8K)
    write(folder / "me" / "rest" / "rows.parquet", OURS)
    write(folder / "gated" / "data" / "train.parquet", OURS)
    with fake_hub(folder, tmp_path / "cache") as variables:
        yield variables


def resolved(hub: dict[str, str], kind: str, **data: list[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", RESOLVE, kind, json.dumps(data)]
    return subprocess.run(command, env={**os.environ, **hub}, cwd=ROOT, capture_output=True, text=True)


def rows_of(done: "subprocess.CompletedProcess[str]", setting: str) -> list[list[dict[str, Any]]]:
    """The rows of each file of a setting."""
    assert done.returncode == 0, done.stderr
    return [pq.read_table(file).to_pylist() for file in json.loads(done.stdout)[setting]]


def test_a_known_data_set_becomes_the_rows_that_trainer_data_writes(hub: dict[str, str]) -> None:
    done = resolved(hub, "train", train_files=["openai/gsm8k"], validation_files=["openai/gsm8k"])
    for setting, split in (("train_files", "train"), ("validation_files", "test")):
        ((row,),) = rows_of(done, setting)
        assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("openai/gsm8k", "8")
        assert row["extra_info"]["split"] == split


def test_another_data_set_is_read_as_it_is_beside_local_files(hub: dict[str, str], tmp_path: Path) -> None:
    """It has no split `test`."""
    local = write(tmp_path / "local.parquet", GSM8K)
    done = resolved(hub, "train", train_files=["me/ours", str(local)], validation_files=["me/ours"])
    assert rows_of(done, "train_files") == [[OURS], [OURS], [GSM8K]]
    assert rows_of(done, "validation_files") == [[OURS]]


def test_fine_tuning_gets_the_columns_of_the_data_set(hub: dict[str, str]) -> None:
    assert rows_of(resolved(hub, "sft", train_files=["me/plain"]), "train_files") == [[GSM8K]]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("gated/data", "data.train_files=gated/data: no such file, and the data set is gated", "then set HF_TOKEN"),
        ("no/data", "data.train_files=no/data: no such file, and no such data set on the hub", "check the name"),
        (
            "me/two",
            "data.train_files=me/two: train files in several folders",
            "easy/train.parquet] or data.train_files=[",
        ),
        ("me/rest", "data.train_files=me/rest: the data set has no train split", "download the file that you mean"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_named(hub: dict[str, str], name: str, message: str, hint: str) -> None:
    done = resolved(hub, "train", train_files=[name])
    error, _, shown = done.stdout.partition("\nhint: ")
    assert error.startswith(message)
    assert hint in shown


@pytest.mark.parametrize(
    ("row", "command"),
    [
        ({"problem": "How many?", "answer": "#### 8"}, "gsm8k --from {file} --column question=problem"),
        (
            {"question": "Half?", "solution": "It is $\\boxed{2}$."},
            "math --from {file} --column question=question",
        ),
        ({"prompt": "How many?", "target": 8}, "dapo --from {file} --column answer=target"),
        (
            {"problem": "Add.", "test_cases": '{"inputs": ["1"], "outputs": ["1"]}'},
            "code --from {file} --column tests=test_cases",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named_with_the_command_that_maps_them(
    tmp_path: Path, row: dict[str, Any], command: str
) -> None:
    file = write(tmp_path / "mine.parquet", row)
    tokenizer = build_tokenizer(["How many?"])
    with pytest.raises(DataError) as caught:
        PromptDataset([file], tokenizer, DataConfig())
    assert f"{file}: no column data_source" in str(caught.value)
    assert f"; the file has {', '.join(row)}" in str(caught.value)
    line = f"python -m trainer data {command.format(file=file)}"
    assert caught.value.hint.startswith(f"`{line}`, then name ")
    made = tmp_path / caught.value.hint.rpartition(" ")[2]
    words = shlex.split(line)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert len(PromptDataset([made], tokenizer, DataConfig(max_prompt_length=512))) == 1


def test_columns_that_hold_no_answer_are_named_with_those_that_a_row_needs(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.parquet", {"text": "How many?"})
    with pytest.raises(DataError) as caught:
        PromptDataset([file], build_tokenizer(["a"]), DataConfig())
    assert caught.value.hint == (
        f"a row needs a question and its answer: `python -m trainer data dapo --from {file} --column question=COLUMN "
        "--column answer=COLUMN`"
    )


def test_a_prompt_under_another_name_needs_no_new_file(tmp_path: Path) -> None:
    row = {**OURS, "question": OURS["prompt"]}
    del row["prompt"]
    with pytest.raises(DataError) as caught:
        PromptDataset([write(tmp_path / "mine.parquet", row)], build_tokenizer(["a"]), DataConfig())
    assert caught.value.hint == "set data.prompt_key=question"
