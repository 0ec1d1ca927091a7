import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.arithmetic import add_without_carry, write_arithmetic
from trainer.data.dataset import PromptSampler
from trainer.data.formats.files import read_rows
from trainer.data.gsm8k import convert_gsm8k
from trainer.errors import CheckpointError, DataError
from trainer.rewards.rules.gsm8k import gsm8k

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return read_rows(path, COLUMNS, "")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return write_arithmetic(
        tmp_path_factory.mktemp("data"), train=500, validation=100, max_number=9, dropped_carries=0.75, seed=0
    )


def test_arithmetic_has_the_columns_of_chat_datasets(files: tuple[Path, Path, Path]) -> None:
    for path in files:
        assert tuple(pq.read_schema(path).names) == COLUMNS
        for row in rows_of(path):
            assert row["prompt"] == [{"role": "user", "content": row["extra_info"]["question"]}]
            assert row["reward_model"]["style"] == "rule"


def test_held_out_questions_are_never_trained_on(files: tuple[Path, Path, Path]) -> None:
    train, demonstrations, validation = ({row["extra_info"]["question"] for row in rows_of(path)} for path in files)
    assert train == demonstrations
    assert not train & validation
    assert (len(train), len(validation)) == (500, 100)


def test_answers_earn_the_reward_except_where_a_demonstration_forgets_to_carry(files: tuple[Path, Path, Path]) -> None:
    def share_right(path: Path) -> float:
        rows = rows_of(path)
        scores = [gsm8k(row["extra_info"]["answer"], row["reward_model"]["ground_truth"]) for row in rows]
        return sum(scores) / len(scores)

    train, demonstrations, validation = map(share_right, files)
    assert train == validation == 1.0
    assert 0.35 < demonstrations < 0.65


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    one, again, other = (
        rows_of(write_arithmetic(tmp_path / name, 50, 10, 9, 0.5, seed)[1])
        for name, seed in (("one", 1), ("again", 1), ("other", 2))
    )
    assert one == again
    assert one != other


def test_more_questions_than_there_are_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only 864 different questions"):
        write_arithmetic(tmp_path, 10_000, 10, 2, 0.5, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("a", "b", "total"), [(7, 5, 2), (17, 5, 12), (3, 4, 7), (10, 0, 10), (99, 1, 90)])
def test_addition_without_carry(a: int, b: int, total: int) -> None:
    assert add_without_carry(a, b) == total


def test_gsm8k_converts_jsonl_and_parquet(tmp_path: Path) -> None:
    records = [{"question": "How many?", "answer": "Two and two.\n#### 1,004"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "train.parquet")
    for source, split in (("test.jsonl", "test"), ("train.parquet", "train")):
        (row,) = rows_of(convert_gsm8k(tmp_path / source))
        assert row["extra_info"]["split"] == split
        assert row["prompt"][0]["content"].startswith("How many?")
        assert gsm8k("#### 1004", row["reward_model"]["ground_truth"]) == 1.0


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"not parquet", "not a readable parquet file"), (b"", "not a readable parquet file")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "train.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        convert_gsm8k(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "train.prompts.parquet").exists()


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"question": ["?"]}), path)
    with pytest.raises(DataError, match="no column answer; the file has question"):
        convert_gsm8k(path)


@given(size=st.integers(1, 40), batch_size=st.integers(1, 60), seed=st.integers(0, 3), before=st.integers(0, 6))
def test_sampler_drops_nothing_and_resumes_exactly(size: int, batch_size: int, seed: int, before: int) -> None:
    sampler = PromptSampler(size, batch_size, shuffle=True, seed=seed)
    drawn = [index for _ in range(before) for index in sampler.next_batch()]
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
    resumed = PromptSampler(size, batch_size, shuffle=True, seed=seed)
    resumed.load_state_dict(sampler.state_dict())
    assert [resumed.next_batch() for _ in range(3)] == [sampler.next_batch() for _ in range(3)]


def test_sampler_refuses_the_state_of_other_data() -> None:
    with pytest.raises(CheckpointError, match="size 10, this run has size 20"):
        PromptSampler(20, 4, True, 0).load_state_dict(PromptSampler(10, 4, True, 0).state_dict())


@pytest.mark.parametrize("position", [-1, 11, 72])
def test_sampler_refuses_a_position_that_no_epoch_has(position: int) -> None:
    sampler = PromptSampler(10, 4, shuffle=True, seed=0)
    with pytest.raises(CheckpointError, match=f"drew {position} of 10 prompts"):
        sampler.load_state_dict({"epoch": 0, "position": position, "size": 10, "seed": 0})
