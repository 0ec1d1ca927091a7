"""Rows that do not divide, and ranks that compute the same rows: results are those of one rank with all rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.trainer.models.test_log_probs_by_family import FAMILIES, PADDED, TEMPERATURE, language_model
from tests.trainer.training import data_group_program
from tests.trainer.training.data_group_program import CASES, Rows
from tests.trainer.training.loss_program import sampled, worker
from tests.trainer.training.ranks import run_program
from trainer.algorithms.losses.aggregation import GlobalCount
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.roles.critic import CriticWorker
from trainer.training.micro_batches import Layout, pack

LAYOUTS = [(size, number) for size, cases in CASES.items() if size > 1 for number in range(len(cases))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("groups")
    run_program(data_group_program.__file__, directory)
    return {size: torch.load(directory / f"world_{size}.pt", weights_only=False) for size in CASES}


@pytest.mark.parametrize(("ranks", "number"), LAYOUTS, ids=lambda value: str(value))
def test_a_layout_computes_what_one_rank_does(
    results: dict[int, list[dict[str, Any]]], ranks: int, number: int
) -> None:
    rows: Rows = CASES[ranks][number][0]
    computed = results[ranks][number]
    expected = results[1][[case for case, _ in CASES[1]].index(rows)]
    assert expected["log_probs"].abs().max() > 1
    assert_close(computed["log_probs"], expected["log_probs"], atol=1e-5, rtol=0)
    assert computed["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
    assert computed["step"] == pytest.approx(expected["step"], rel=1e-5, abs=1e-6)
    for name, gradient in expected["gradients"].items():
        assert (computed["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0
    for name, weight in expected["weights"].items():
        assert_close(computed["weights"][name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("network", [partial(PolicyNetwork, temperature=TEMPERATURE), ValueNetwork])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_masked_row_passes_through_every_family_and_gives_each_weight_a_gradient_of_zero(
    family: str, network: Callable[..., nn.Module]
) -> None:
    made = network(language_model(family)).requires_grad_(True)
    layout = Layout.PADDED if family in PADDED else Layout.SHARED
    outputs = made(pack(sampled().masked_row(), torch.device("cpu"), layout, ranks=2))
    total = sum(values.sum() for values in outputs) if isinstance(outputs, tuple) else outputs.sum()
    total.backward()
    assert not any(weight.grad.any() for weight in made.parameters())


@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
def test_a_masked_row_adds_nothing_to_any_loss_or_metric(policy_loss: str) -> None:
    row = sampled().masked_row()
    zeros = torch.zeros(row.response_mask.shape, requires_grad=True)
    loss, metrics = worker(policy_loss, "seq-mean-token-mean", 1).loss((zeros, zeros), row, GlobalCount(5, 2))
    loss.backward()
    assert (loss.item(), {value.item() for value in metrics.values()}) == (0.0, {0.0})
    assert zeros.grad is not None
    assert not zeros.grad.any()


def test_a_masked_row_adds_nothing_to_a_critics_loss() -> None:
    row = sampled().with_(values=sampled().advantages, returns=sampled().advantages).masked_row()
    zeros = torch.zeros(row.response_mask.shape, requires_grad=True)
    critic = CriticWorker(Config(), RankPlace(0, 1, "127.0.0.1", "cpu"))
    loss, metrics = critic.loss(zeros, row, GlobalCount(5, 2))
    loss.backward()
    assert (loss.item(), metrics["value_loss"].item()) == (0.0, 0.0)
    assert zeros.grad is not None
    assert not zeros.grad.any()


def test_a_masked_row_adds_nothing_where_an_update_corrects_and_rejects() -> None:
    made = worker("ppo", "token-mean", 1)
    settings = {"old_log_probs": "engine", "correction": "tis", "correction_normalize": True}
    made.config = Config.model_validate({"algorithm": settings, "actor": {"policy_loss": "gpg"}})
    row = replace(sampled().masked_row(), corrections=None)
    zeros = torch.zeros(row.response_mask.shape, requires_grad=True)
    loss, metrics = made.loss((zeros, zeros), row, GlobalCount(5, 2))
    assert (loss.item(), {value.item() for value in metrics.values()}) == (0.0, {0.0})
