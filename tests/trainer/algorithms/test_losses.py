"""Losses, aggregation and corrections: equal to loops over plain numbers, and the same for any split of the rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.tensors import normal, random_mask, seeds
from tests.trainer.training import loss_program
from trainer.algorithms.corrections.icepop import icepop
from trainer.algorithms.corrections.sequence_mask import sequence_mask
from trainer.algorithms.corrections.tis import truncated_importance_sampling
from trainer.algorithms.losses.aggregation import Aggregation, GlobalCount, aggregate
from trainer.algorithms.losses.kl import KlEstimator, adapted_kl_coefficient, kl_estimate, kl_loss
from trainer.algorithms.losses.value_loss import clipped_value_loss
from trainer.algorithms.off_policy.importance import approximate_kl, raw_ratio
from trainer.algorithms.policy_losses.cispo import cispo
from trainer.algorithms.policy_losses.gspo import gspo
from trainer.algorithms.policy_losses.ppo import ppo
from trainer.algorithms.registry import CORRECTIONS, POLICY_LOSSES
from trainer.cluster.place import RankPlace
from trainer.compat.settings import load_config
from trainer.config.sections.algorithm import AlgorithmConfig
from trainer.config.sections.roles import ActorConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.errors import ConfigError
from trainer.roles.actor import ActorWorker

MODES: tuple[Aggregation, ...] = get_args(Aggregation)
SCALE_LENGTH = 7


@dataclass(frozen=True)
class Clip:
    low: float
    high: float
    dual: float | None = None

    def settings(self) -> dict[str, float | None]:
        return {"clip_ratio": 0.2, "clip_ratio_low": self.low, "clip_ratio_high": self.high, "clip_dual": self.dual}


def token_losses(name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> Tensor:
    row = POLICY_LOSSES[name]
    values = {name: clip.settings().get(name, parameter.default) for name, parameter in row.parameters.items()}
    return row.loss(log_probs, old, advantages, mask, **values).loss


CLIPS = (Clip(0.2, 0.2), Clip(0.2, 0.28), Clip(0.2, 0.2, dual=3.0), Clip(0.1, 0.5, dual=1.5))
ONE = torch.ones(1, 1, dtype=torch.bool)


def count_of(mask: Tensor) -> GlobalCount:
    return GlobalCount(int(mask.sum()), len(mask))


def slow_aggregate(values: Sequence[Sequence[float]], mode: str) -> float:
    rows = [row for row in values if row]
    tokens = sum(len(row) for row in rows)  # a row without tokens counts as a response
    match mode:
        case "token-mean":
            return sum(map(sum, rows)) / tokens
        case "token-sum":
            return sum(map(sum, rows))
        case "seq-mean-token-sum":
            return sum(map(sum, rows)) / len(values)
        case "seq-mean-token-sum-norm":
            return sum(map(sum, rows)) / len(values) / SCALE_LENGTH
        case _:
            return sum(sum(row) / len(row) for row in rows) / len(values)


def slow_surrogate(ratio: float, advantage: float, clip: Clip) -> float:
    """The smaller objective, as in the papers; with A < 0, at least c A."""
    held = min(max(ratio, 1 - clip.low), 1 + clip.high)
    objective = min(ratio * advantage, held * advantage)
    if clip.dual is not None and advantage < 0:
        objective = max(objective, clip.dual * advantage)
    return -objective


@pytest.mark.parametrize("mode", MODES)
@given(seed=seeds)
def test_aggregation_equals_a_loop(mode: Aggregation, seed: int) -> None:
    values, mask = normal(seed, 4, 5), random_mask(seed, 4, 5)
    mask[3] = False  # a response whose tokens are all masked
    expected = slow_aggregate([row[chosen].tolist() for row, chosen in zip(values, mask, strict=True)], mode)
    assert aggregate(values, mask, mode, count_of(mask), SCALE_LENGTH).item() == pytest.approx(expected)


@pytest.mark.parametrize("length", [16, 3072])
def test_dr_grpo_divides_the_sum_of_each_response_by_a_constant_length(length: int) -> None:
    """Liu et al. 2025, arXiv:2503.20783, section 3.2: neither the responses' own lengths nor a plain sum."""
    config, _ = load_config(["dr_grpo"], [f"data.max_response_length={length}"])
    actor = ActorWorker(config, RankPlace(0, 1, "127.0.0.1", "cpu"))
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    token_ids, prompt_lengths = torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    batch = Batch(token_ids, prompt_lengths, mask, advantages=torch.ones(2, 6))
    log_probs = torch.zeros(2, 6, requires_grad=True)
    loss, _ = actor.loss((log_probs, torch.zeros(2, 6)), batch, count_of(mask))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert_close(gradient, -mask.float() / 2 / length)


def test_a_constant_length_that_divides_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss_scale_length=700 has no effect with loss_aggregation=token-mean"):
        load_config([], ["actor.loss_scale_length=700"])


@pytest.mark.parametrize("clip", CLIPS)
@given(seed=seeds)
def test_ppo_equals_a_loop(clip: Clip, seed: int) -> None:
    new, old, advantages, mask = (
        normal(seed, 3, 5),
        normal(seed + 1, 3, 5),
        normal(seed + 2, 3, 5),
        random_mask(seed, 3, 5),
    )
    expected = [
        slow_surrogate(math.exp(n - o), a, clip)
        for n, o, a in zip(new[mask].tolist(), old[mask].tolist(), advantages[mask].tolist(), strict=True)
    ]
    assert_close(
        ppo(new, old, advantages, mask, **clip.settings()).loss[mask], torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("clip", CLIPS[:2])
@given(seed=seeds)
def test_gspo_is_the_sequence_level_objective(clip: Clip, seed: int) -> None:
    """Compares the gradient of equation 5 of the paper, by autograd, with that of the loss per token."""
    new, old = normal(seed, 3, 5).requires_grad_(), normal(seed + 1, 3, 5)
    row_advantages, mask = normal(seed + 2, 3), random_mask(seed, 3, 5)
    advantages = row_advantages.unsqueeze(1).expand(3, 5)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        ratio = (new[row] - old[row])[mask[row]].mean().exp()
        objective = torch.minimum(
            ratio * row_advantages[row], ratio.clamp(1 - clip.low, 1 + clip.high) * row_advantages[row]
        )
        total = total - objective / 3
    (expected,) = torch.autograd.grad(total, new)
    loss = aggregate(
        gspo(new, old, advantages, mask, 0.2, clip.low, clip.high).loss, mask, "seq-mean-token-mean", count_of(mask)
    )
    (gradient,) = torch.autograd.grad(loss, new)
    assert_close(loss.detach(), total.detach())
    assert_close(gradient, expected)


def test_gspo_has_no_dual_clip() -> None:
    log_probs = torch.full((1, 4), -1.0, requires_grad=True)
    mask, advantages = torch.ones(1, 4, dtype=torch.bool), torch.full((1, 4), -1.0)
    loss = aggregate(
        gspo(log_probs, log_probs.detach() - 2, advantages, mask, 0.2, None, None).loss,
        mask,
        "token-mean",
        count_of(mask),
    )
    loss.backward()
    assert log_probs.grad is not None
    assert_close(loss.item(), math.exp(2), rtol=1e-6, atol=0)  # 7.39, where a dual clip would give 3 ...
    assert_close(log_probs.grad.sum().item(), math.exp(2), rtol=1e-6, atol=0)  # ... and no gradient


@pytest.mark.parametrize("row", [row.name for row in POLICY_LOSSES.values() if "clip_dual" not in row.parameters])
def test_a_parameter_of_another_loss_is_refused(row: str) -> None:
    with pytest.raises(ValidationError, match=f"clip_dual has no effect with policy_loss={row}, only with dppo_kl"):
        ActorConfig.model_validate({"policy_loss": row, "clip_dual": 2.0})


def test_one_lost_token_costs_at_most_the_cap_of_k3() -> None:
    lost, liked = torch.tensor([-15.0], requires_grad=True), torch.tensor([-1.0])
    estimate = kl_estimate(lost, liked, "k3")
    assert estimate.item() == 10  # without a cap, exp(14) would decide the reward
    (gradient,) = torch.autograd.grad(estimate.sum(), lost)
    assert gradient.item() == 0
    assert kl_estimate(torch.tensor([-3.0]), liked, "k3").item() == pytest.approx(math.exp(2) - 3)


@given(seed=seeds)
def test_cispo_gives_every_token_a_gradient_of_bounded_weight(seed: int) -> None:
    new, old = normal(seed, 3, 5).requires_grad_(), normal(seed + 1, 3, 5)
    advantages, mask = normal(seed + 2, 3, 5), random_mask(seed, 3, 5)
    loss = aggregate(
        cispo(new, old, advantages, mask, 0.2, clip_ratio_low=0.3, clip_ratio_high=0.4).loss,
        mask,
        "token-sum",
        count_of(mask),
    )
    (gradient,) = torch.autograd.grad(loss, new)
    weight = (new - old).detach().exp().clamp(0.7, 1.4)
    assert_close(gradient, (-weight * advantages).where(mask, 0.0))
    assert (gradient[mask] != 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "loss", "clipped"),
    [
        (1.0, 2.0, CLIPS[0], -2.0, False),
        (1.5, 2.0, CLIPS[0], -2.4, True),  # no gain from a larger ratio
        (1.25, 2.0, CLIPS[1], -2.5, False),  # unless clip-higher allows it
        (1.5, 2.0, CLIPS[1], -2.56, True),
        (0.5, 2.0, CLIPS[0], -1.0, False),  # a step back towards ratio 1 is not clipped
        (0.5, -2.0, CLIPS[0], 1.6, True),
        (1.5, -2.0, CLIPS[0], 3.0, False),
        (4.0, -2.0, CLIPS[0], 8.0, False),
        (4.0, -2.0, CLIPS[2], 6.0, True),  # dual clip applies only to negative advantages
        (4.0, 2.0, CLIPS[2], -2.4, True),
    ],
)
def test_ppo_at_and_around_the_clip(ratio: float, advantage: float, clip: Clip, loss: float, clipped: bool) -> None:
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    result = ppo(log_probs, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), ONE, **clip.settings())
    result.loss.sum().backward()
    assert_close(result.loss.detach(), torch.tensor([[loss]]))
    assert bool(result.clipped) is clipped
    assert (log_probs.grad == 0).all() == clipped
    assert_close(approximate_kl(log_probs, torch.tensor([[-1.0]])), torch.tensor([[ratio - 1 - math.log(ratio)]]))


@given(st.floats(-1e6, 1e6))
def test_no_log_ratio_overflows(log_ratio: float) -> None:
    log_probs, old, advantage = torch.tensor([[log_ratio]]), torch.zeros(1, 1), torch.tensor([[-1.0]])
    for name in POLICY_LOSSES:
        assert token_losses(name, log_probs, old, advantage, ONE, CLIPS[0]).isfinite()
    assert approximate_kl(log_probs, old).isfinite()
    assert all(kl_estimate(log_probs, old, k).isfinite().all() for k in get_args(KlEstimator))
    assert raw_ratio(log_probs, old).isfinite()


@given(seed=seeds, clip_range=st.none() | st.floats(0.01, 2))
def test_value_loss_equals_a_loop(seed: int, clip_range: float | None) -> None:
    values, old, returns = normal(seed, 2, 5), normal(seed + 1, 2, 5), normal(seed + 2, 2, 5)
    expected = []
    for v, o, r in zip(values.flatten().tolist(), old.flatten().tolist(), returns.flatten().tolist(), strict=True):
        held = v if clip_range is None else min(max(v, o - clip_range), o + clip_range)
        expected.append(max((v - r) ** 2, (held - r) ** 2) / 2)
    loss = clipped_value_loss(values, old, returns, clip_range)
    assert_close(loss.flatten(), torch.tensor(expected, dtype=torch.float64))


def gradient_in_parts(
    seed: int, ranks: int, cuts: Sequence[int], name: str, mode: Aggregation
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of a shared weight and metric of 8 rows in float32, split as training splits them."""
    rows, tokens, width = 8, 6, 4
    features = normal(seed, rows, tokens, width).float()
    old, advantages, reference = (normal(seed + i, rows, tokens).float() for i in (1, 2, 3))
    mask, count = random_mask(seed, rows, tokens), count_of(random_mask(seed, rows, tokens))
    weight = normal(seed + 4, width).float().requires_grad_()
    total, metric = torch.zeros(()), torch.zeros(())
    for rank in range(ranks):
        of_rank = torch.arange(rows)[rank * rows // ranks : (rank + 1) * rows // ranks]
        for part in torch.tensor_split(of_rank, [cut for cut in cuts if cut < len(of_rank)]):
            log_probs = features[part] @ weight
            losses = token_losses(name, log_probs, old[part], advantages[part], mask[part], CLIPS[2])
            losses = losses + 0.1 * kl_loss(log_probs, reference[part], "k3", unbiased=True)
            loss = aggregate(losses, mask[part], mode, count)
            loss.backward()
            total, metric = total + loss.detach(), metric + aggregate(losses.detach(), mask[part], "token-mean", count)
    assert weight.grad is not None
    scale = max(1.0, float(weight.grad.abs().max()))
    return total / scale, weight.grad / scale, metric / scale


@pytest.mark.parametrize("mode", MODES[::2])
@pytest.mark.parametrize("name", loss_program.SPLITTABLE)
@given(seed=seeds, ranks=st.sampled_from([1, 2, 4]), cuts=st.lists(st.integers(1, 7), max_size=3).map(sorted))
@settings(max_examples=25)
def test_any_split_over_ranks_and_micro_batches_gives_the_same_gradient(
    name: str, mode: Aggregation, seed: int, ranks: int, cuts: list[int]
) -> None:
    whole = gradient_in_parts(seed, 1, [], name, mode)
    for gradient, expected in zip(gradient_in_parts(seed, ranks, cuts, name, mode), whole, strict=True):
        assert_close(gradient, expected, atol=1e-6, rtol=1e-6)


@given(seed=seeds)
def test_masked_tokens_and_padding_change_no_loss(seed: int) -> None:
    mask = random_mask(seed, 3, 7)
    a, b, c = (normal(seed + i, 3, 7) for i in range(3))
    dirty = [tensor.where(mask, 50.0) for tensor in (a, b, c)]
    padded = [torch.nn.functional.pad(tensor, (0, 3)) for tensor in (a, b, c)]
    wide = torch.nn.functional.pad(mask, (0, 3))
    for mode in MODES:
        for name in POLICY_LOSSES:
            clean = aggregate(token_losses(name, a, b, c, mask, CLIPS[2]), mask, mode, count_of(mask))
            assert_close(aggregate(token_losses(name, *dirty, mask, CLIPS[2]), mask, mode, count_of(mask)), clean)
            assert_close(aggregate(token_losses(name, *padded, wide, CLIPS[2]), wide, mode, count_of(mask)), clean)
    ratio = raw_ratio(a, b)
    for row in CORRECTIONS.values():
        parameters = row.values(AlgorithmConfig())
        assert_close(row.weights(ratio.where(mask, 1e6), mask, **parameters), row.weights(ratio, mask, **parameters))


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_the_unbiased_loss_has_the_value_of_the_estimate_and_the_gradient_of_the_divergence(estimator: str) -> None:
    """Takes the exact expectation: three tokens, each outcome weighted by its probability."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    log_probs = logits.log_softmax(0)
    weights = log_probs.exp().detach()  # probability of each token; sampling carries no gradient
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits, retain_graph=True)
    loss = kl_loss(log_probs, reference, estimator, unbiased=True)
    assert_close(loss.detach(), kl_estimate(log_probs, reference, estimator).detach())
    (gradient,) = torch.autograd.grad((weights * loss).sum(), logits, retain_graph=True)
    assert_close(gradient, expected)
    biased = kl_loss(log_probs, reference, estimator, unbiased=False)
    (other,) = torch.autograd.grad((weights * biased).sum(), logits)
    assert torch.allclose(other, expected) == (estimator == "k2")


@pytest.mark.parametrize(
    ("kl", "coefficient"), [(0.1, 0.2), (0.11, 0.2 * (1 + 0.1 * 0.5)), (9.0, 0.2 * 1.1), (0.0, 0.2 * 0.9)]
)
def test_adaptive_control_follows_the_kl_within_bounds(kl: float, coefficient: float) -> None:
    assert adapted_kl_coefficient(0.2, kl, target=0.1, horizon=100, samples=50) == pytest.approx(coefficient)


def test_each_correction_handles_ratios_outside_the_band() -> None:
    ratio, mask = torch.tensor([[0.1, 1.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert_close(truncated_importance_sampling(ratio, mask, 2.0), torch.tensor([[0.1, 1.0, 2.0]]))
    assert_close(icepop(ratio, mask, 0.5, 2.0), torch.tensor([[0.0, 1.0, 0.0]]))
    assert_close(sequence_mask(ratio, mask, 0.5, 2.0), torch.ones(1, 3))  # 0.4 ** (1/3) = 0.74
    assert_close(sequence_mask(ratio, torch.tensor([[True, True, False]]), 0.5, 2.0), torch.zeros(1, 3))


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_a_single_step_uses_its_own_log_probs_as_the_old_ones(policy_loss: str) -> None:
    asked = loss_program.sampled()
    sampled_log_probs = asked.response_mask * normal(4, *asked.response_mask.shape)
    actor, count = loss_program.worker(policy_loss, "token-mean", 1), count_of(asked.response_mask)

    def loss_and_gradient(old_log_probs: Tensor | None) -> tuple[Tensor, Tensor]:
        log_probs = sampled_log_probs.clone().requires_grad_()
        batch = replace(asked, old_log_probs=old_log_probs)
        loss, _ = actor.loss((log_probs, torch.zeros_like(log_probs)), batch, count)
        return loss.detach(), torch.autograd.grad(loss, log_probs)[0]

    loss, gradient = loss_and_gradient(None)
    expected_loss, expected_gradient = loss_and_gradient(sampled_log_probs)
    assert_close(loss, expected_loss, atol=0, rtol=0)
    assert_close(gradient, expected_gradient, atol=0, rtol=0)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"actor": {"mini_batch_size": 16}}, True),
        ({"actor": {"mini_batch_size": 32, "ppo_epochs": 2}}, True),
        ({"actor": {"mini_batch_size": 32, "kl_loss_coefficient": 0.1}}, False),
        ({"algorithm": {"advantage": "grpo", "kl_coefficient": 0.1}}, True),
        ({"rollout": {"samples_per_prompt": 2, "compare_freq": 1}}, True),
    ],
)
def test_old_log_probs_are_computed_only_where_needed(settings: dict[str, dict[str, float]], needed: bool) -> None:
    single_step: dict[str, dict[str, object]] = {
        "algorithm": {"advantage": "grpo", "kl_coefficient": 0},
        "data": {"train_batch_size": 16},
        "rollout": {"samples_per_prompt": 2, "compare_freq": 0},
        "actor": {"mini_batch_size": 32},
    }
    assert Config.model_validate(single_step | settings).needs_old_log_probs(step=1) is needed


def test_engines_return_log_probs_in_the_first_step_and_every_tenth_after_it() -> None:
    assert [step for step in range(1, 30) if Config().has_rollout_log_probs(step)] == [1, 11, 21]


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": {"correction": "tis"}},
        {"algorithm": {"rejection": {"token_k1": 2}}},
        {"algorithm": {"old_log_probs": "engine"}},
        {"watchdogs": {"ratio_drift": {"action": "stop"}}},
        {"trainer": {"trajectories": {"per_token": True}}},
    ],
)
def test_engines_return_log_probs_in_every_step_that_reads_them(settings: dict[str, object]) -> None:
    config = Config.model_validate({"rollout": {"compare_freq": 0}, **settings})
    assert all(config.has_rollout_log_probs(step) for step in range(1, 5))
