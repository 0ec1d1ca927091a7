from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.sections.data import DataConfig
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import Config
from trainer.data.arithmetic import add_without_carry, write_arithmetic
from trainer.data.dataset import PromptSampler
from trainer.data.formats.files import read_rows
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
    first, again, other = (
        rows_of(write_arithmetic(tmp_path / name, 50, 10, 9, 0.5, seed)[1])
        for name, seed in (("one", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first != other


def test_more_questions_than_there_are_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only 864 different questions"):
        write_arithmetic(tmp_path, 10_000, 10, 2, 0.5, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("a", "b", "total"), [(7, 5, 2), (17, 5, 12), (3, 4, 7), (10, 0, 10), (99, 1, 90)])
def test_addition_without_carry(a: int, b: int, total: int) -> None:
    assert add_without_carry(a, b) == total


@given(size=st.integers(1, 40), batch_size=st.integers(1, 60), seed=st.integers(0, 3), before=st.integers(0, 6))
def test_sampler_drops_nothing_and_resumes_exactly(size: int, batch_size: int, seed: int, before: int) -> None:
    sampler = PromptSampler(size, batch_size, shuffle=True, seed=seed)
    drawn = [index for _ in range(before) for index in sampler.next_batch()]
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
    resumed = PromptSampler(size, batch_size, shuffle=True, seed=seed)
    resumed.load_state_dict(sampler.state_dict())
    assert [resumed.next_batch() for _ in range(3)] == [sampler.next_batch() for _ in range(3)]


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    before=st.integers(0, 6),
)
def test_with_drop_last_an_epoch_ends_with_its_last_whole_batch(
    size: int, batch_size: int, shuffle: bool, seed: int, before: int
) -> None:
    settings = DataConfig(train_batch_size=min(batch_size, size), drop_last=True, shuffle=shuffle)
    trainer = TrainerConfig(seed=seed)
    sampler, per_epoch = PromptSampler.of(settings, trainer, size), size // settings.train_batch_size
    assert settings.batches(size, 3) == 3 * per_epoch
    epochs = [[index for _ in range(per_epoch) for index in sampler.next_batch()] for _ in range(3)]
    for drawn in epochs:
        assert len(set(drawn)) == len(drawn)
    assert epochs[0] == list(range(len(epochs[0]))) or shuffle
    for _ in range(before):
        sampler.next_batch()
    resumed = PromptSampler.of(settings, trainer, size)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.peek() == sampler.peek()
    assert [resumed.next_batch() for _ in range(3)] == [sampler.next_batch() for _ in range(3)]


@pytest.mark.parametrize(("drop_last", "steps"), [(True, 105), (False, 109)])
def test_steps_of_7473_rows_in_batches_of_1024_over_15_epochs(drop_last: bool, steps: int) -> None:
    data = {"train_batch_size": 1024, "drop_last": drop_last}

    def steps_of(**trainer: object) -> tuple[int, int]:
        config = Config.model_validate({"data": data, "trainer": {"total_epochs": 15, **trainer}})
        return config.steps(7473), config.planned_steps(7473)

    assert steps_of() == (steps, steps)
    assert steps_of(total_steps=500) == (500, 500)
    assert steps_of(total_steps=500, stop_after_epochs=True) == (steps, 500)


def test_a_batch_of_more_rows_than_there_are_is_refused() -> None:
    settings = DataConfig(train_batch_size=100_000)
    with pytest.raises(DataError, match="train_batch_size=100000: a step would repeat the 4096 rows") as caught:
        PromptSampler.of(settings, TrainerConfig(), 4096)
    assert "data.train_batch_size=4096" in caught.value.hint
    assert len(PromptSampler.of(settings, TrainerConfig(), 100_000).next_batch()) == 100_000
    PromptSampler.of(settings, TrainerConfig(validate_only=True), 4096)  # which draws no batch


def test_sampler_refuses_the_state_of_other_data() -> None:
    with pytest.raises(CheckpointError, match="size 10, this run has size 20"):
        PromptSampler(20, 4, True, 0).load_state_dict(PromptSampler(10, 4, True, 0).state_dict())


@pytest.mark.parametrize("position", [-1, 11, 72])
def test_sampler_refuses_a_position_that_no_epoch_has(position: int) -> None:
    sampler = PromptSampler(10, 4, shuffle=True, seed=0)
    with pytest.raises(CheckpointError, match=f"drew {position} of 10 prompts"):
        sampler.load_state_dict({"epoch": 0, "position": position, "size": 10, "seed": 0})
