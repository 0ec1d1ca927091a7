"""Routers in layouts of ranks and micro-batches: records, replays and losses that balance, compared with one rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.models.expert_families import ROUTED
from tests.trainer.models.test_log_probs_by_family import language_model, rows
from tests.trainer.training import router_program
from tests.trainer.training.ranks import run_program
from tests.trainer.training.router_program import FAMILIES, LAYOUTS, LOSSES, SETTINGS
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.networks import PolicyNetwork
from trainer.models.routers import routers_and_blocks
from trainer.training.engine import TrainingEngine
from trainer.training.ranks.sharding import Execution

BFLOAT16 = Execution(torch.device("cpu"), torch.bfloat16)
UPDATES = ("own", "others", "with losses", "with losses of others")
CASES = [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts if layout != "whole"]
Found = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """By number of ranks: what each rank results_of_layout."""
    directory = tmp_path_factory.mktemp("routers")
    run_program(router_program.__file__, directory)
    return {size: torch.load(directory / f"world_{size}.pt", weights_only=False) for size in LAYOUTS}


def choices(results_of_layout: dict[str, Any]) -> dict[int, Tensor]:
    """The recorded experts of each row of the whole batch."""
    return {
        int(row): torch.cat([part for _, part in parts])
        for row, parts in zip(results_of_layout["rows"], results_of_layout["segments"], strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world_size", "layout"), CASES)
def test_every_layout_records_what_one_rank_does(
    results: dict[int, list[Found]], family: str, world_size: int, layout: str
) -> None:
    whole = choices(results[1][0][family, "whole"])
    recorded: dict[int, Tensor] = {}
    for rank in results[world_size]:
        recorded |= choices(rank[family, layout])
    assert sorted(recorded) == sorted(whole)
    assert all(torch.equal(recorded[row], whole[row]) for row in whole)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world_size", "layout"), CASES)
def test_gradients_and_metrics_do_not_depend_on_the_layout(
    results: dict[int, list[Found]], family: str, world_size: int, layout: str, update: str
) -> None:
    whole, results_of_layout = results[1][0][family, "whole"][update], results[world_size][0][family, layout][update]
    assert results_of_layout["metrics"] == pytest.approx(whole["metrics"], rel=1e-5)
    for name, gradient in whole["gradients"].items():
        difference = float((results_of_layout["gradients"][name] - gradient).norm()) / max(float(gradient.norm()), 1e-4)
        assert difference < 1e-5, f"{name}: {difference}"


@pytest.mark.parametrize("family", FAMILIES)
def test_other_choices_and_losses_change_gradients(results: dict[int, list[Found]], family: str) -> None:
    whole = results[1][0][family, "whole"]
    name = next(name for name in whole["own"]["gradients"] if name.endswith(("gate.weight", "router.weight")))
    gradients = [whole[update]["gradients"][name] for update in UPDATES]
    for first in range(4):
        for other in range(first):
            assert (gradients[first] - gradients[other]).norm() > 1e-3 * gradients[first].norm()
    assert (whole["log-probs of others"] - whole["log-probs"]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_are_those_of_their_definition(results: dict[int, list[Found]], family: str) -> None:
    """Computed row by row by Transformers' own routers and differentiated as a part of the loss."""
    model, batch = language_model(*ROUTED[family]), rows()
    routed: list[tuple[Tensor, Tensor]] = []
    for router, _ in routers_and_blocks(model):
        router.register_forward_hook(lambda _m, _a, output: routed.append((output[0], output[2])))
    losses = torch.zeros(2)
    for row in range(len(batch)):
        routed.clear()
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        model(input_ids=batch.token_ids[row : row + 1, :length], use_cache=False)
        for logits, chosen in routed:
            logits, chosen = logits[prompt - 1 : length - 1], chosen[prompt - 1 : length - 1]
            scores = logits.sigmoid() if family == "deepseek_v3" else logits.softmax(dim=1)
            means = (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)
            shares = torch.bincount(chosen.flatten(), minlength=logits.shape[1]) / chosen.numel()
            balance = logits.shape[1] * (shares * means).sum()
            losses = losses + torch.stack([balance, logits.logsumexp(dim=1).square().mean()]) / len(batch)
    layers = len(routed)
    whole = results[1][0][family, "whole"]
    metrics = whole["with losses"]["metrics"]
    assert metrics["router_aux_loss"] == pytest.approx(float(losses[0].detach()) / layers, rel=1e-5)
    assert metrics["router_z_loss"] == pytest.approx(float(losses[1].detach()) / layers, rel=1e-5)
    (losses * torch.tensor(LOSSES)).sum().backward()
    for name, weight in model.named_parameters():
        added = (
            whole["with losses"]["gradients"][f"language_model.{name}"]
            - whole["own"]["gradients"][f"language_model.{name}"]
        )
        expected = torch.zeros_like(added) if weight.grad is None else weight.grad
        assert_close(added, expected, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_routers_in_float32_do_not_round_tokens_weights_and_logits(family: str) -> None:
    """Everything else is rounded to bfloat16, and so are the weights that experts' results get."""
    model = language_model(*ROUTED[family])
    exact = [router.weight.detach().clone() for router, _ in routers_and_blocks(model)]
    engine = TrainingEngine(PolicyNetwork(model, 1.0), replace(BFLOAT16, float32_routers=True), SETTINGS)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    for router, _ in routers_and_blocks(engine.network):
        # Before FSDP rounds what they return.
        router.register_forward_hook(lambda _, given, routed: seen.append((given[0], *routed[:2])), prepend=True)
    engine.forward(rows(), MicroBatchLimit(100))
    for weight, (tokens, logits, weights) in zip(exact, seen, strict=True):
        assert tokens.dtype is logits.dtype is weights.dtype is torch.float32
        bias = logits - torch.nn.functional.linear(tokens, weight)
        assert_close(bias, bias[:1].expand_as(bias))
