"""KTO: its formula against TRL's, its data, and a whole run."""

import json
from pathlib import Path
from typing import Any

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
from trainer.algorithms.preferences.dpo import log_ratios
from trainer.algorithms.preferences.kto import estimated_kl, mismatched, unpaired_advantages
from trainer.algorithms.registry import UNPAIRED_LOSSES
from trainer.algorithms.rows import Labelled
from trainer.config.kto import KtoConfig, KtoSettings
from trainer.config.sections.data import DataConfig
from trainer.data.formats.files import read_rows
from trainer.data.preferences import LabelledResponse, read_labelled
from trainer.errors import DataError
from trainer.models.small import build_tokenizer
from trainer.runs.offline.kto import reward_means

DESIRABLE = torch.tensor([True, False, True, False, False, True])


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
@given(seed=seeds, beta=st.floats(0.01, 2), weight=st.floats(0.1, 3), kl=st.floats(0, 5))
def test_a_policy_gradient_step_with_its_weights_equals_a_step_on_the_loss(
    name: str, seed: int, beta: float, weight: float, kl: float
) -> None:
    log_probs, reference = normal(seed, 6, 5).requires_grad_(), normal(seed + 1, 6, 5)
    mask = random_mask(seed, 6, 5)
    settings = KtoSettings(loss=name, beta=beta, desirable_weight=weight, undesirable_weight=2.0)

    # TRL's formulas, row by row, differentiated by autograd.
    expected_losses = []
    own_kl = {"kto": kl, "apo_zero_unpaired": 0.0}[name]
    for row, desirable in enumerate(DESIRABLE.tolist()):
        ratio = (log_probs[row] - reference[row])[mask[row]].sum()
        gain = ratio - own_kl if desirable else own_kl - ratio
        expected_losses.append((weight if desirable else 2.0) * (1 - torch.sigmoid(beta * gain)))
    (expected,) = torch.autograd.grad(torch.stack(expected_losses).mean(), log_probs)

    responses = Labelled(log_ratios(log_probs.detach(), reference, mask), DESIRABLE, kl)
    advantages, losses = unpaired_advantages(responses, mask, settings.losses)
    token_losses = ppo(log_probs, log_probs.detach(), advantages, mask, 0.2, None, None, 3.0).loss
    (gradient,) = torch.autograd.grad(
        aggregate(token_losses, mask, "seq-mean-token-sum", GlobalCount(int(mask.sum()), 6)), log_probs
    )
    assert_close(gradient, expected)
    assert_close(losses, torch.stack(expected_losses).detach())


def test_numbers_of_the_formula() -> None:
    responses = Labelled(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), kl=1.0)
    assert KtoSettings(beta=0.5).losses(responses).tolist() == pytest.approx([0.377541, 0.622459], abs=1e-6)
    weighted = KtoSettings(beta=0.5, desirable_weight=2, undesirable_weight=0.5).losses(responses)
    assert weighted.tolist() == pytest.approx([0.755081, 0.311230], abs=1e-6)
    without_kl = KtoSettings(beta=0.5, loss="apo_zero_unpaired").losses(responses)
    assert without_kl.tolist() == pytest.approx([0.268941, 0.731059], abs=1e-6)


def test_the_kl_is_the_mean_over_mismatched_rows_and_never_negative() -> None:
    log_probs, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    assert estimated_kl(log_probs, torch.zeros(2, 2), mask) == 3.0
    assert estimated_kl(-log_probs, torch.zeros(2, 2), mask) == 0.0
    assert mismatched(["a", "b", "c"]) == ["c", "a", "b"]
    with pytest.raises(ValidationError, match=r"set data\.train_batch_size to 2 or more"):
        KtoConfig(data=DataConfig(train_batch_size=1))
    KtoConfig(data=DataConfig(train_batch_size=1), kto=KtoSettings(loss="apo_zero_unpaired"))


def test_rewards_are_averaged_by_label() -> None:
    responses = Labelled(torch.tensor([1.0, 3.0, -4.0]), torch.tensor([True, True, False]))
    means = reward_means(responses, 0.5)
    assert means == {"kto/desirable_reward": 1.0, "kto/undesirable_reward": -2.0, "kto/margin": 3.0}
    assert reward_means(Labelled(torch.tensor([1.0]), torch.tensor([True])), 1.0) == {"kto/desirable_reward": 1.0}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["How many are 1 + 2? #### 3"])


def write(path: Path, *rows: dict[str, Any]) -> Path:
    prompt = {"prompt": [{"role": "user", "content": "1+2?"}]}
    path.write_text("".join(json.dumps(prompt | row) + "\n" for row in rows))
    return path


def test_rows_have_a_completion_and_a_label(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "assistant", "content": "44"}]
    rows = [{"completion": "3", "label": True}, {"completion": messages, "label": False}]
    right, wrong = read_labelled([write(tmp_path / "rows.jsonl", *rows)], tokenizer, DataConfig())
    assert isinstance(right, LabelledResponse)
    assert (right.desirable, tokenizer.decode(right.completion.response)) == (True, "3<|end|>")
    assert (wrong.desirable, tokenizer.decode(wrong.completion.response)) == (False, "44<|end|>")
    assert right.completion.prompt == wrong.completion.prompt


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"completion": "", "label": True}, "row 1: completion is empty"),
        ({"completion": "3", "label": "yes"}, "row 1: label is 'yes' instead of true or false"),
        ({"completion": "3", "label": None}, "row 1: label is None"),
        ({"completion": "3" * 40, "label": True}, "row 1: a response has 41 tokens"),
        ({"completion": "4", "label": False}, "every label is false"),
    ],
)
def test_unusable_rows_are_refused(tmp_path: Path, tokenizer: Any, row: dict[str, Any], words: str) -> None:
    file = write(tmp_path / "rows.jsonl", {"completion": "44", "label": False}, row)
    with pytest.raises(DataError) as caught:
        read_labelled([file], tokenizer, DataConfig())
    assert words in str(caught.value)


@pytest.mark.full
def test_a_run_learns_the_labels_and_repeats_to_the_bit(runs: Runs, tmp_path: Path) -> None:
    files = []
    for path in write_preferences(tmp_path, 32, 8, max_number=9, seed=0):
        pairs = read_rows(path, ("prompt", "chosen", "rejected"), "")
        rows = [
            {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
            for pair in pairs
            for kind in ("chosen", "rejected")
        ]
        files.append(write(path.with_suffix(".jsonl"), *rows))
    settings = {
        "model.path": runs.model,
        "data.train_files": files[0],
        "data.validation_files": files[1],
        "data.max_prompt_length": 128,
        "data.max_response_length": 32,
        "data.train_batch_size": 16,
        "kto.beta": 0.5,
        "actor.learning_rate": 1e-3,
        "trainer.output_dir": runs.directory,
        "trainer.nnodes": 1,
        "trainer.total_steps": 6,
        "trainer.save_freq": 0,
    }
    run = runs.launch("kto", "kto", settings)
    run.succeed()
    before, *steps = run.metrics()
    assert before["validation/kto_margin"] == 0.0  # policy and reference are one
    assert steps[0]["kto/loss"] == pytest.approx(0.5, abs=1e-5)
    assert steps[-1]["validation/kto_margin"] > 0.0
    assert steps[-1]["validation/kto_loss"] < before["validation/kto_loss"]
    assert (run.directory / "model" / "config.json").is_file()
    assert runs.replay(run).results(6) == run.results(6)  # compared by the model alone: the run saved no checkpoint
