"""DPO: its formula against the textbook, its data, and a whole run on two Ray nodes."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.trainer.tensors import normal, random_mask, seeds
from tests.trainer.whole_run import Runs
from trainer.algorithms.aggregation import GlobalCount, aggregate
from trainer.algorithms.dpo import dpo_advantages, dpo_loss, preference_margins
from trainer.algorithms.policy_losses.ppo import ppo
from trainer.config.data import DataConfig
from trainer.data.arithmetic import write_preferences
from trainer.data.files import read_rows
from trainer.data.preferences import read_pairs
from trainer.errors import DataError
from trainer.models.small import build_tokenizer
from trainer.rewards.rules.gsm8k import gsm8k
from trainer.runs.dpo import DpoConfig, pair_batch


@given(seed=seeds, beta=st.floats(0.01, 2), smoothing=st.floats(0, 0.4))
@settings(deadline=None)
def test_a_policy_gradient_step_with_its_weights_equals_a_step_of_dpo(seed: int, beta: float, smoothing: float) -> None:
    log_probs, reference = normal(seed, 6, 5).requires_grad_(), normal(seed + 1, 6, 5)
    mask = random_mask(seed, 6, 5)

    # The textbook: sums over each response, pair by pair, differentiated by autograd.
    expected_loss = torch.zeros((), dtype=torch.float64)
    for pair in range(3):
        sums = [(log_probs[row] - reference[row])[mask[row]].sum() for row in (2 * pair, 2 * pair + 1)]
        margin = beta * (sums[0] - sums[1])
        expected_loss = expected_loss - (1 - smoothing) / 3 * margin.sigmoid().log()
        expected_loss = expected_loss - smoothing / 3 * (-margin).sigmoid().log()
    (expected,) = torch.autograd.grad(expected_loss, log_probs)

    margins = preference_margins(log_probs.detach(), reference, mask, beta)
    advantages = dpo_advantages(margins, mask, beta, smoothing)
    losses = ppo(log_probs, log_probs.detach(), advantages, mask, clip_dual=3.0).loss
    (found,) = torch.autograd.grad(
        aggregate(losses, mask, "seq-mean-token-sum", GlobalCount(int(mask.sum()), 6)), log_probs
    )
    assert_close(found, expected)
    assert_close(dpo_loss(margins, smoothing).mean(), expected_loss.detach())


def test_the_loss_of_the_reference_itself_is_log_2() -> None:
    assert dpo_loss(torch.zeros(1), 0.0).item() == pytest.approx(math.log(2))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["How many are 1 + 2? #### 3"])


def write(path: Path, **columns: Any) -> Path:
    row = {"prompt": [{"role": "user", "content": "1+2?"}], "chosen": "3", "rejected": "4", **columns}
    pq.write_table(pa.Table.from_pylist([row]), path)
    return path


def test_the_right_answer_is_preferred_to_a_wrong_one(tmp_path: Path) -> None:
    for path in write_preferences(tmp_path, 50, 10, max_number=9, seed=0):
        for row in read_rows(path, ("prompt", "chosen", "rejected"), ""):
            truth = row["chosen"].rpartition(" ")[2]
            assert gsm8k(row["chosen"], truth) == 1.0
            assert gsm8k(row["rejected"], truth) == 0.0


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [{"role": "assistant", "content": text}]])
def test_responses_are_text_or_messages_and_end_with_the_end_token(tmp_path: Path, tokenizer: Any, wrap: Any) -> None:
    path = write(tmp_path / "pairs.parquet", chosen=wrap("3"), rejected=wrap("44"))
    (pair,) = read_pairs([path], tokenizer, DataConfig())
    assert tokenizer.decode(pair.chosen) == "3<|end|>"
    assert tokenizer.decode(pair.rejected) == "44<|end|>"
    batch = pair_batch([pair])
    assert batch.response_mask.sum(dim=1).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"chosen": ""}, "row 0: chosen is empty"),
        ({"rejected": []}, "row 0: rejected is empty"),
        ({"rejected": "3"}, "row 0: chosen and rejected are the same"),
        ({"prompt": "1+2?"}, "row 0: column prompt is not a list of messages"),
        ({"chosen": "3" * 40}, "row 0: a response has 41 tokens, data.max_response_length is 16"),
    ],
)
def test_equal_or_overlong_pairs_are_refused(
    tmp_path: Path, tokenizer: Any, columns: dict[str, Any], words: str
) -> None:
    path = write(tmp_path / "pairs.parquet", **columns)
    with pytest.raises(DataError) as caught:
        read_pairs([path], tokenizer, DataConfig())
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_workers_take_one_step_per_batch() -> None:
    config = DpoConfig(data=DataConfig(train_batch_size=8)).for_workers()
    assert config.actor.mini_batch_size == 16
    assert config.actor.loss_aggregation == "seq-mean-token-sum"
    assert not config.needs_critic


def test_a_run_learns_the_preferences_and_resumes(runs: Runs, tmp_path: Path) -> None:
    train, held_out = write_preferences(tmp_path, 64, 15, max_number=9, seed=0)
    common = {
        "model.path": runs.model,
        "data.train_files": train,
        "data.validation_files": held_out,
        "data.max_prompt_length": 128,
        "data.max_response_length": 32,
        "data.train_batch_size": 16,
        "actor.learning_rate": 3e-4,
        "trainer.output_dir": runs.directory,
        "trainer.test_freq": 4,
    }
    whole = runs.launch("dpo", "dpo", common | {"trainer.total_steps": 4, "trainer.save_freq": 2})
    whole.succeed()
    rows = whole.metrics()
    assert rows[1]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are one
    assert rows[4]["dpo/loss"] < rows[1]["dpo/loss"]
    assert rows[4]["validation/preference_accuracy"] > 0.5
    assert (whole.directory / "model" / "config.json").is_file()
    checkpoint = whole.directory / "checkpoints" / "step_000002"
    resumed = runs.launch("dpo", "dpo-resumed", common | {"trainer.total_steps": 4, "trainer.resume": checkpoint})
    resumed.succeed()
    assert [resumed.results(step) for step in (3, 4)] == [whole.results(step) for step in (3, 4)]
