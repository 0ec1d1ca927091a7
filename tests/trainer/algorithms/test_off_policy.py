"""The gap between engine and trainer: weights of tokens and responses, and rejection."""

import math
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from pydantic import ValidationError
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.tensors import normal, random_mask, seeds
from trainer.algorithms.losses.aggregation import GlobalCount
from trainer.algorithms.off_policy.rejection import Criterion
from trainer.algorithms.rows import Sampled
from trainer.algorithms.token_rewards import on_trained_tokens, token_rewards
from trainer.cluster.place import RankPlace
from trainer.config.sections.algorithm import AlgorithmConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.roles.actor import ActorWorker

BOUNDS = {"k1": (0.8, 1.3), "k2": 0.05, "k3": 0.04, "veto": 0.7}


def policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of trainer and engine, and a mask."""
    engine = -normal(seed, 5, 6).abs() - 0.05
    return engine + 0.3 * normal(seed + 1, 5, 6), engine, random_mask(seed, 5, 6)


def slow_accepted(criterion: str, differences: Sequence[float]) -> list[bool]:
    """Which tokens of a response meet the criterion, from log(trainer / engine) of each."""
    scope, _, estimator = criterion.rpartition("_")
    bound = BOUNDS[estimator]
    if estimator == "veto":
        return [min(map(math.exp, differences)) >= bound] * len(differences)
    values = {
        "k1": list(differences),
        "k2": [d * d / 2 for d in differences],
        "k3": [math.exp(d) - 1 - d for d in differences],
    }[estimator]
    match scope:
        case "token":
            statistics = values
        case "seq_sum":
            statistics = [sum(values)] * len(values)
        case "seq_mean":
            statistics = [sum(values) / len(values)] * len(values)
        case _:
            statistics = [max(values)] * len(values)
    if isinstance(bound, tuple):
        return [bound[0] <= math.exp(value) <= bound[1] for value in statistics]
    return [value <= bound for value in statistics]


@pytest.mark.parametrize("criterion", get_args(Criterion))
@given(seed=seeds)
@settings(max_examples=30)
def test_a_token_trains_if_it_meets_the_criterion(criterion: Criterion, seed: int) -> None:
    trainer, engine, mask = policies(seed)
    bound = BOUNDS[criterion.rpartition("_")[2]]
    algorithm = AlgorithmConfig.model_validate({"rejection": {criterion: bound}})
    accepted = algorithm.off_policy.apply(trainer, engine, mask).accepted
    for row in range(len(mask)):
        differences = (trainer - engine)[row, mask[row]].tolist()
        assert accepted[row, mask[row]].tolist() == slow_accepted(criterion, differences)
    assert not (accepted & ~mask).any()


def test_all_criteria_must_be_met() -> None:
    trainer, engine, mask = policies(3)
    both = AlgorithmConfig.model_validate({"rejection": {"token_k1": 1.3, "seq_mean_k2": 0.05}})
    alone = [AlgorithmConfig.model_validate({"rejection": {name: bound}}) for name, bound in both.rejection.items()]
    first, second = (criterion.off_policy.apply(trainer, engine, mask).accepted for criterion in alone)
    assert (first != second).any()
    assert torch.equal(both.off_policy.apply(trainer, engine, mask).accepted, first & second)


@pytest.mark.parametrize(
    ("rejection", "words"),
    [
        ({"token_k4": 1}, "token_k1"),
        ({"token_k2": [0.1, 0.2]}, "token_k2 takes one bound"),
        ({"seq_mean_k1": [1.1, 0.9]}, "the lower one comes first"),
        ({"token_k3": -1}, "bounds are above 0"),
        ({"token_k1": 0}, "bounds are above 0"),
        ({"token_k1": [0, 2]}, "bounds are above 0"),
        ({"token_k2": float("inf")}, "bounds are above 0"),
        ({"token_k1": float("nan")}, "bounds are above 0"),
    ],
)
def test_bounds_must_fit_their_criterion(rejection: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmConfig.model_validate({"rejection": rejection})


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("tis", [[2.0, 0.25, 1.0], [1.5, 1.5, 0.0]]),
        ("icepop", [[0.0, 0.0, 1.0], [1.5, 1.5, 0.0]]),
        ("sequence_tis", [[1.0, 1.0, 1.0], [2.0, 2.0, 0.0]]),  # products 4 x 0.25 x 1 and 1.5 x 1.5
        ("sequence_icepop", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        ("sequence_mask", [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),  # geometric means 1 and 1.5
    ],
)
def test_weights_of_tokens_and_of_responses(correction: str, weights: list[list[float]]) -> None:
    trainer = torch.tensor([[4.0, 0.25, 1.0], [1.5, 1.5, 9.0]]).log()
    mask, expected = torch.tensor([[True, True, True], [True, True, False]]), torch.tensor(weights)
    plain = AlgorithmConfig(correction=correction).off_policy.apply(trainer, torch.zeros(2, 3), mask)
    assert plain.weights is not None
    assert_close(plain.weights, expected)
    by_response = correction.startswith("sequence")
    mean = expected[:, 0].mean() if by_response else expected.sum() / 5
    normal_mean = AlgorithmConfig(correction=correction, correction_normalize=True).off_policy
    normalized = normal_mean.apply(trainer, torch.zeros(2, 3), mask).weights
    assert normalized is not None
    assert_close(normalized, expected / mean)


@pytest.mark.parametrize(
    ("correction", "bounded"),
    [
        ("tis", [[True, False, False], [False, False, True], [True, True, False]]),
        ("icepop", [[True, True, False], [False, False, True], [True, True, False]]),
        ("sequence_tis", [[False] * 3, [True] * 3, [True, True, False]]),
        ("sequence_icepop", [[False] * 3, [True] * 3, [True, True, False]]),
        ("sequence_mask", [[False] * 3, [False] * 3, [True, True, False]]),
    ],
)
def test_tokens_count_as_corrected_where_a_bound_changed_their_weight(
    correction: str, bounded: list[list[bool]]
) -> None:
    trainer = torch.tensor([[4.0, 0.25, 1.0], [0.9, 1.1, 3.0], [3.0, 3.0, 1.0]]).log()  # geometric means 1, 1.4 and 3
    mask = torch.tensor([[True] * 3, [True] * 3, [True, True, False]])
    bounds_met = AlgorithmConfig(correction=correction).off_policy.apply(trainer, torch.zeros(3, 3), mask).bounded
    assert bounds_met.tolist() == bounded


def test_weights_of_whole_responses_have_the_mean_1_over_responses() -> None:
    trainer = torch.tensor([[3.0, 1.0, 1.0], [3.0, 3.0, 3.0]]).log()
    mask = torch.tensor([[False, True, True], [True, True, True]])
    algorithm = AlgorithmConfig(correction="sequence_mask", correction_normalize=True)
    corrected = algorithm.off_policy.apply(trainer, torch.zeros(2, 3), mask).weights
    assert corrected is not None
    assert_close(corrected, torch.tensor([[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]))


def actor_loss(settings: dict[str, dict[str, object]], new: Tensor, batch: Batch) -> tuple[float, Tensor]:
    """The loss of one rank and its gradient with respect to the log-probs."""
    log_probs = new.clone().requires_grad_()
    actor = ActorWorker(Config.model_validate(settings), RankPlace(0, 1, "127.0.0.1", "cpu"))
    count = GlobalCount(int(batch.response_mask.sum()), len(batch))
    loss, _ = actor.loss((log_probs, torch.zeros_like(new)), batch, count)
    return loss.item(), torch.autograd.grad(loss, log_probs)[0]


@given(seed=seeds)
@settings(max_examples=20)
def test_with_the_engine_as_old_policy_weights_follow_the_policy_during_the_update(seed: int) -> None:
    new, engine, mask = policies(seed)
    advantages = normal(seed + 2, 5, 6)
    token_ids, prompt_lengths = torch.zeros(5, 7, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    batch = Batch(token_ids, prompt_lengths, mask, old_log_probs=engine, advantages=advantages)
    rejection = {"seq_mean_k1": [0.9, 1.1]}
    kept = AlgorithmConfig.model_validate({"rejection": rejection}).off_policy.apply(new, engine, mask).accepted

    algorithm = {"old_log_probs": "engine", "rejection": rejection}
    actor: dict[str, object] = {"policy_loss": "gpg"}
    _, gradient = actor_loss({"actor": actor, "algorithm": {**algorithm, "correction": "tis"}}, new, batch)
    weights = (new - engine).exp().clamp(max=2)
    assert_close(gradient, (-weights * advantages).where(kept, 0.0) / mask.sum())

    _, gradient = actor_loss({"actor": {"policy_loss": "ppo", "clip_dual": None}, "algorithm": algorithm}, new, batch)
    unclipped = actor_loss({"actor": {"policy_loss": "ppo", "clip_dual": None}}, new, batch)[1]
    assert_close(gradient, unclipped.where(kept, 0.0))


@pytest.mark.parametrize("policy_loss", ["gmpo", "gspo"])
def test_with_the_engine_as_old_policy_a_response_learns_as_if_it_had_no_rejected_token(policy_loss: str) -> None:
    new, engine = torch.full((1, 20), -1.0), torch.full((1, 20), -1.1)
    new[0, 5] = -5.0
    mask, kept = torch.ones(1, 20, dtype=torch.bool), torch.arange(20) != 5
    token_ids, prompt_lengths = torch.zeros(1, 21, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    batch = Batch(token_ids, prompt_lengths, mask, old_log_probs=engine, advantages=torch.ones(1, 20))
    actor = {"policy_loss": policy_loss, "loss_aggregation": "seq-mean-token-mean"}
    rejecting = {"actor": actor, "algorithm": {"old_log_probs": "engine", "rejection": {"token_k1": 2.0}}}
    without = batch.with_(response_mask=mask & kept)
    rejected, wanted = actor_loss(rejecting, new, batch), actor_loss({"actor": actor}, new, without)
    assert rejected[0] == pytest.approx(wanted[0])
    assert_close(rejected[1], wanted[1])


@pytest.mark.parametrize("advantage", ["gae", "remax", "reinforce_plus_plus", "optimal_token_baseline"])
def test_a_response_whose_last_token_is_rejected_learns_from_its_score(advantage: str) -> None:
    engine = torch.full((3, 4), -1.0)
    trainer = engine.clone()
    trainer[0, 3] = -3.0
    mask = torch.ones(3, 4, dtype=torch.bool)
    accepted = AlgorithmConfig.model_validate({"rejection": {"token_k1": 2.0}}).off_policy.apply(trainer, engine, mask)
    rewards = token_rewards(torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3, 4), mask, 0.0)
    sampled = Sampled(
        on_trained_tokens(rewards, accepted.accepted),
        accepted.accepted,
        groups=torch.zeros(3, dtype=torch.int64),
        values=torch.zeros(3, 4),
        greedy_scores=torch.zeros(3),
        log_probs=trainer,
        squared_probabilities=torch.full((3, 4), 0.5),
    )
    algorithm = AlgorithmConfig.model_validate({"advantage": advantage})
    advantages = algorithm.estimator.estimate(sampled, **algorithm.estimator.values(algorithm)).advantages
    assert_close(advantages[0, :3], advantages[1, :3])
    assert advantages[0, 3] == 0
    assert (advantages[0, :3] > advantages[2, :3]).all()


def test_rewards_of_tokens_that_do_not_train_go_to_the_nearest_earlier_token_that_does() -> None:
    rewards = torch.tensor([[1.0, 2.0, 0.0, 4.0, 5.0], [1.0, 2.0, 3.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    trained = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    moved = torch.tensor([[3.0, 0.0, 0.0, 9.0, 0.0], [1.0, 5.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    assert_close(on_trained_tokens(rewards, trained), moved)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": {"correction_normalize": True}}, "nothing to normalize"),
        ({"algorithm": {"old_log_probs": "engine", "correction": "tis"}}, "already corrects for the engine"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Config.model_validate(settings)
