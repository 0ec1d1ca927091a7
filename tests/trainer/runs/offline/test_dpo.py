"""DPO: its formula against the textbook, its data, and a whole run on two Ray nodes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.testing import assert_close

from tests.trainer.pairs import write_preferences
from tests.trainer.tensors import normal, random_mask, seeds
from tests.trainer.whole_run import Runs
from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.algorithms.policy_losses.ppo import ppo
from trainer.algorithms.preferences.dpo import preference_advantages, preference_pairs
from trainer.algorithms.registry import PREFERENCE_LOSSES
from trainer.config.dpo import DpoConfig, DpoSettings
from trainer.config.kto import KtoConfig
from trainer.config.offline import OfflineConfig
from trainer.config.sections.data import DataConfig
from trainer.data.formats.files import read_rows
from trainer.data.preferences import read_pairs
from trainer.errors import DataError
from trainer.models.small import build_tokenizer
from trainer.rewards.rules.gsm8k import gsm8k
from trainer.runs.offline.dpo import completions_of
from trainer.runs.offline.run import completion_batch


def logistic(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.logsigmoid(x)


# TRL's formulas, of the log-ratios c and r, their means over tokens mc and mr, beta b and label smoothing s.
FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": lambda c, r, b, s, **_: -(1 - s) * logistic(b * (c - r)) - s * logistic(-b * (c - r)),
    "robust": lambda c, r, b, s, **_: (-(1 - s) * logistic(b * (c - r)) + s * logistic(-b * (c - r))) / (1 - 2 * s),
    "hinge": lambda c, r, b, **_: torch.relu(1 - b * (c - r)),
    "ipo": lambda mc, mr, b, **_: (mc - mr - 1 / (2 * b)) ** 2,
    "sigmoid_norm": lambda mc, mr, b, **_: -logistic(b * (mc - mr)),
    "nca_pair": lambda c, r, b, **_: -logistic(b * c) - 0.5 * logistic(-b * c) - 0.5 * logistic(-b * r),
    "sppo_hard": lambda c, r, b, **_: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "apo_zero": lambda c, r, b, **_: 1 - torch.sigmoid(b * c) + torch.sigmoid(b * r),
    "apo_down": lambda c, r, b, **_: torch.sigmoid(b * c) + 1 - torch.sigmoid(b * (c - r)),
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@given(seed=seeds, beta=st.floats(0.01, 2), smoothing=st.floats(0, 0.4))
def test_a_policy_gradient_step_with_its_weights_equals_a_step_on_the_loss(
    name: str, seed: int, beta: float, smoothing: float
) -> None:
    log_probs, reference = normal(seed, 6, 5).requires_grad_(), normal(seed + 1, 6, 5)
    mask = random_mask(seed, 6, 5)
    given_settings = {"label_smoothing": smoothing} if name in ("sigmoid", "robust") else {}
    chosen = DpoSettings(loss=name, beta=beta, **given_settings)

    # The textbook: sums over each response, pair by pair, differentiated by autograd.
    expected_losses = []
    for pair in range(3):
        rows = (2 * pair, 2 * pair + 1)
        c, r = ((log_probs[row] - reference[row])[mask[row]].sum() for row in rows)
        mc, mr = c / mask[rows[0]].sum(), r / mask[rows[1]].sum()
        expected_losses.append(FORMULAS[name](c=c, r=r, mc=mc, mr=mr, b=beta, s=smoothing))
    (expected,) = torch.autograd.grad(torch.stack(expected_losses).mean(), log_probs)

    advantages, losses = preference_advantages(
        preference_pairs(log_probs.detach(), reference, mask), mask, chosen.losses
    )
    token_losses = ppo(log_probs, log_probs.detach(), advantages, mask, 0.2, None, None, 3.0).loss
    (gradient,) = torch.autograd.grad(
        aggregate(token_losses, mask, "seq-mean-token-sum", GlobalCount(int(mask.sum()), 6)), log_probs
    )
    assert_close(gradient, expected)
    assert_close(losses, torch.stack(expected_losses).detach())


def test_the_loss_of_the_reference_itself_is_log_2() -> None:
    pairs = preference_pairs(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert DpoSettings().losses(pairs).tolist() == pytest.approx([math.log(2)])


def test_a_loss_far_from_the_reference_stays_finite() -> None:
    log_probs = torch.tensor([[-1e4], [1e4]])
    pairs = preference_pairs(log_probs, torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool))
    _, losses = preference_advantages(pairs, torch.ones(2, 1, dtype=torch.bool), DpoSettings(beta=1.0).losses)
    assert losses.tolist() == [2e4]


def test_label_smoothing_is_refused_where_no_loss_reads_it() -> None:
    with pytest.raises(ValidationError, match=r"label_smoothing=0.1 has no effect with loss=ipo; .* robust, sigmoid"):
        DpoSettings(loss="ipo", label_smoothing=0.1)


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
    assert tokenizer.decode(pair.chosen.response) == "3<|end|>"
    assert tokenizer.decode(pair.rejected.response) == "44<|end|>"
    batch = completion_batch(completions_of([pair]))
    assert batch.response_mask.sum(dim=1).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"chosen": ""}, "row 0: chosen is empty"),
        ({"rejected": []}, "row 0: rejected is empty"),
        ({"rejected": "3"}, "row 0: chosen and rejected are the same"),
        ({"prompt": ["1+2?"]}, "row 0: column prompt is neither text nor a list of messages"),
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


@pytest.mark.parametrize("config", [DpoConfig, KtoConfig])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"actor": {"policy_loss": "gspo"}}, "actor.policy_loss=gspo has no effect on (DPO|KTO): leave it out"),
        ({"actor": {"ppo_epochs": 2}}, "actor.ppo_epochs=2 has no effect"),
        ({"actor": {"kl_loss_coefficient": 0.1}}, "actor.kl_loss_coefficient=0.1 has no effect"),
        ({"actor": {"mini_batch_size": 8}}, "set data.train_batch_size"),
        ({"data": {"custom_cls": {"path": "rows.py", "name": "Rows"}}}, "data.custom_cls has no effect"),
    ],
)
def test_a_setting_that_the_run_does_not_read_is_refused(
    config: type[OfflineConfig], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        config.model_validate(settings)


def test_workers_take_one_step_per_batch() -> None:
    config = DpoConfig(data=DataConfig(train_batch_size=8)).for_workers()
    assert config.actor.mini_batch_size == 16
    assert config.actor.loss_aggregation == "seq-mean-token-sum"
    assert not config.needs_critic


@pytest.mark.full
def test_a_run_learns_the_preferences_and_resumes_and_a_replay_resumes_too(runs: Runs, tmp_path: Path) -> None:
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
    assert [row["step"] for row in runs.replay(resumed).metrics()] == [3, 4]
