"""The rules of families' routers, choices that take the place of their by_itself, and the loads of experts."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.trainer.models.expert_families import EXPERTS, ROUTED, write_experts_model
from tests.trainer.models.test_log_probs_by_family import language_model, rows
from trainer.data.batches.batch import Batch
from trainer.data.batches.routes import Routes, Segment
from trainer.errors import DataError
from trainer.models.networks import PolicyNetwork, is_packed
from trainer.models.packing import PackedRows, routes_of_rows
from trainer.models.pretrained import load_language_model
from trainer.models.routers import Routers, check_routers, imbalance, routers_and_blocks

HINT = "leave it out"


def network(case: str) -> PolicyNetwork:
    family, special = ROUTED[case]
    return PolicyNetwork(model(family, special), 0.7)


def model(family: str, special: dict[str, object]) -> nn.Module:
    """A model whose biases that correct the choice of experts are not zero."""
    made = language_model(family, special)
    generator = torch.Generator().manual_seed(6)
    for name, buffer in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2, generator=generator)
    return made


def computed(policy: PolicyNetwork, batch: Batch, share_prompts: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of a loss."""
    policy.zero_grad()
    log_probs, entropy = policy(PackedRows.of(batch, share_prompts=share_prompts and is_packed(policy.decoder)))
    (log_probs + log_probs.square() / 20 - entropy).sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}
    return log_probs.detach(), gradients


def recorded(policy: PolicyNetwork, batch: Batch, share_prompts: bool = False) -> Routes:
    share_prompts = share_prompts and is_packed(policy.decoder)
    with torch.no_grad():
        policy(PackedRows.of(batch, share_prompts=share_prompts))
    return routes_of_rows(batch, share_prompts, policy.routers.chosen().numpy().astype(np.uint8))


def changed(routes: Routes, change: Callable[[Segment], list[Segment]]) -> Routes:
    return Routes([[new for part in parts for new in change(part)] for parts in routes.segments])


@pytest.mark.parametrize("case", ROUTED)
def test_a_rule_gives_the_weights_and_gradients_of_the_familys_own_router(case: str) -> None:
    family, special = ROUTED[case]
    decoder = model(family, special).get_decoder()
    rule = Routers(decoder).rule
    assert rule is not None
    pairs = list(routers_and_blocks(decoder))
    assert len(pairs) == (2 if "first_k_dense_replace" not in special else 1)
    for router, block in pairs:
        hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(2))
        bias = (block.e_score_correction_bias,) if hasattr(block, "e_score_correction_bias") else ()
        logits, weights, chosen = copy.deepcopy(router)(hidden, *bias)
        assert torch.equal(rule.weights(logits, chosen).to(weights.dtype), weights)
        by_family, by_rule = (
            torch.autograd.grad(values.square().sum(), logits, retain_graph=True)[0]
            for values in (weights, rule.weights(logits, chosen))
        )
        assert by_family.any()
        assert_close(by_rule, by_family)


def test_the_rule_of_a_model_whose_weights_stay_in_their_files(tmp_path: Path) -> None:
    in_files = load_language_model(write_experts_model(tmp_path / "model", "deepseek_v3"), in_files=True)
    assert Routers(in_files.get_decoder()).rule == Routers(network("deepseek_v3").decoder).rule is not None


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("case", ROUTED)
def test_the_own_choices_again_give_the_same_bits_and_others_do_not(case: str, share_prompts: bool) -> None:
    policy, batch = network(case), rows()
    log_probs, gradients = computed(policy, batch, share_prompts)
    routes = recorded(policy, batch, share_prompts)
    again, gradients_again = computed(policy, batch.with_(routes=routes), share_prompts)
    assert torch.equal(again, log_probs)
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name], gradient), name

    experts = policy.routers.experts
    moved = changed(routes, lambda part: [Segment(part.first, (part.choices + 1) % experts)])
    others = recorded(policy, batch.with_(routes=moved), share_prompts)
    for row, parts in enumerate(moved.segments):
        for part, others_found in zip(parts, others.segments[row], strict=True):
            assert np.array_equal(part.choices, others_found.choices)
    other, _ = computed(policy, batch.with_(routes=moved), share_prompts)
    assert (other - log_probs).abs().max() > 1e-3


def test_choices_are_repeated_after_the_weights_have_changed() -> None:
    policy, batch = network("qwen3_moe"), rows()
    routes = recorded(policy, batch)
    with torch.no_grad():
        for router, _ in routers_and_blocks(policy.decoder):
            router.weight.neg_()
    by_itself = recorded(policy, batch)
    assert not np.array_equal(by_itself.segments[0][1].choices, routes.segments[0][1].choices)
    kept = recorded(policy, batch.with_(routes=routes))
    for row, parts in enumerate(routes.segments):
        for part, others_found in zip(parts, kept.segments[row], strict=True):
            assert np.array_equal(part.choices, others_found.choices)


def test_tokens_without_a_record_choose_by_themselves() -> None:
    policy, batch = network("qwen3_moe"), rows()
    by_itself = recorded(policy, batch)
    moved = changed(by_itself, lambda part: [Segment(part.first, (part.choices + 1) % 4)])
    # Of each row the tokens from the third on, and nothing of the first row.
    some = Routes([[], *([Segment(2, np.concatenate([p.choices for p in parts])[2:])] for parts in moved.segments[1:])])
    others_found = recorded(policy, batch.with_(routes=some))

    def first_layer(routes: Routes, row: int) -> np.ndarray:
        return np.concatenate([part.choices for part in routes.segments[row]])[:, 0]

    assert np.array_equal(first_layer(others_found, 0), first_layer(by_itself, 0))
    for row in range(1, len(batch)):
        assert np.array_equal(first_layer(others_found, row)[:2], first_layer(by_itself, row)[:2])
        assert np.array_equal(first_layer(others_found, row)[2:], first_layer(moved, row)[2:])


def test_rows_that_share_a_prompt_share_its_record() -> None:
    routes = recorded(network("qwen3_moe"), rows(), share_prompts=True)
    of_prompts = [parts[0].choices for parts in routes.segments]
    assert of_prompts[2] is of_prompts[4] is of_prompts[6]
    assert len({id(choices) for choices in of_prompts}) == 4


def test_loads_count_the_choices_of_tokens_that_predict_a_response_token() -> None:
    policy, batch = network("qwen3_moe"), rows()
    chosen = recorded(policy, batch)
    expected = torch.zeros(2, 4, dtype=torch.int64)
    for row, parts in enumerate(chosen.segments):
        choices = np.concatenate([part.choices for part in parts])
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        for token in range(prompt - 1, length - 1):
            for layer in range(2):
                expected[layer, choices[token, layer].astype(int)] += 1
    assert torch.equal(policy.routers.loads(), expected)
    assert expected.sum() == 2 * 2 * int(batch.response_mask.sum())


def test_imbalance_is_the_busiest_expert_over_the_mean() -> None:
    loads = torch.tensor([[4, 4, 4, 4], [0, 16, 0, 0], [6, 2, 4, 4]])
    assert imbalance(loads) == (pytest.approx((1 + 4 + 1.5) / 3), 4.0)


@pytest.mark.parametrize(
    ("family", "special", "reason"),
    [
        ("qwen3", {}, "qwen3 models have no experts"),
        ("llama4_text", {**EXPERTS, "num_local_experts": 4}, "how the routers of llama4_text models weigh experts"),
    ],
)
def test_models_without_a_known_rule_are_refused_by_name(family: str, special: dict[str, object], reason: str) -> None:
    with torch.device("meta"):
        made = language_model(family, special)
    with pytest.raises(DataError, match=f"^actor.router_replay=recompute: {reason}") as refused:
        check_routers(made, ["actor.router_replay=recompute"])
    assert HINT in str(refused.value.hint)
    check_routers(made, [])
