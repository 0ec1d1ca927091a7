"""Layers from shared operators: on CPU with their formulas, which define what the kernels compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.training.megatron_program import language_model
from trainer.data.batches.batch import Batch
from trainer.errors import ConfigError, WorkerError
from trainer.models.backends.exact import BACKEND
from trainer.models.exact.gradients import Norm, Product, Rope, SiluProduct
from trainer.models.exact.layers import use_operators
from trainer.models.exact.operators import FORMULAS, Operators, rope_table
from trainer.models.networks import PolicyNetwork
from trainer.models.packing import PackedRows
from trainer.runs.advantages import check_exact
from trainer.training.self_check import check_rows

FITTING = {"model_type": "qwen2", "hidden_size": 1536, "num_attention_heads": 12}


def network(exact: bool, operators: Operators = FORMULAS) -> PolicyNetwork:
    policy = PolicyNetwork(language_model("Qwen2 and 2.5"), 0.7)
    if exact:
        use_operators(policy, operators)
    return policy


@pytest.fixture
def batch() -> Batch:
    """Rows of different lengths, two of which have the same prompt."""
    return check_rows(vocabulary=64)


def found_by(made: PolicyNetwork, batch: Batch, share_prompts: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    log_probs, entropy = made(PackedRows.of(batch, share_prompts=share_prompts))
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(2))
    (log_probs * weights + 0.1 * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), {name: weight.grad for name, weight in made.named_parameters()}


@pytest.mark.parametrize("share_prompts", [False, True])
def test_log_probs_and_gradients_are_transformers(batch: Batch, share_prompts: bool) -> None:
    expected = found_by(network(exact=False), batch, share_prompts)
    computed = found_by(network(exact=True), batch, share_prompts)
    assert_close(computed[:2], expected[:2], atol=1e-5, rtol=0)
    assert computed[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert_close(computed[2][name], gradient, atol=2e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_checkpointed_layers_compute_the_same(batch: Batch) -> None:
    made = network(exact=True)
    made.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in made.decoder.layers:
        layer.training = True
    expected, recomputed = found_by(network(exact=True), batch, True), found_by(made, batch, True)
    assert torch.equal(recomputed[0], expected[0])
    assert all(torch.equal(recomputed[2][name], gradient) for name, gradient in expected[2].items())


def test_every_operator_of_the_network_is_a_shared_one(batch: Batch) -> None:
    """An operator that Transformers or torch computes in its own way would round in its own way."""
    called: dict[str, int] = {}

    def counted(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called[name] = called.get(name, 0) + 1
            return operator(*arguments, **named)

        return call

    names = ("product", "norm", "rope", "attention", "log_probs")
    operators = Operators(**{name: counted(name, getattr(FORMULAS, name)) for name in names})
    made = network(exact=True, operators=operators)
    with torch.no_grad():
        made(PackedRows.of(batch))
    layers = len(made.decoder.layers)
    assert called == {
        "product": 7 * layers + 1,
        "norm": 2 * layers + 1,
        "rope": layers,
        "attention": layers,
        "log_probs": 1,
    }


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(sum(shape)))


TABLE = rope_table(8, 4, 10000.0, torch.device("cpu"), torch.float32)
POSITIONS = torch.tensor([0, 1, 5])


@pytest.mark.parametrize(
    ("operator", "formula", "inputs"),
    [
        (
            lambda x, w, b: Product.apply(x, w, b, FORMULAS),
            FORMULAS.product,
            (tensor(3, 8), tensor(4, 8), tensor(4)),
        ),
        (
            lambda x, w: Norm.apply(x, w, 1e-6, FORMULAS),
            lambda x, w: FORMULAS.norm(x, w, 1e-6),
            (tensor(3, 8), tensor(8)),
        ),
        (
            lambda q, k: torch.cat(Rope.apply(q, k, POSITIONS, 4, TABLE, FORMULAS), dim=1),
            lambda q, k: torch.cat(FORMULAS.rope(POSITIONS, q, k, 4, TABLE), dim=1),
            (tensor(3, 8), tensor(3, 4)),
        ),
        (
            SiluProduct.apply,
            lambda gate, up: torch.nn.functional.silu(gate) * up,
            (tensor(3, 8), tensor(3, 9)[:, :8]),
        ),
    ],
    ids=["product", "norm", "rope", "silu"],
)
def test_gradients_are_those_that_torch_derives_from_the_formulas(
    operator: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    def gradients(compute: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [part.clone().requires_grad_() for part in inputs]
        result = compute(*leaves)
        return torch.autograd.grad(result, leaves, tensor(*result.shape))

    for gradient, expected in zip(gradients(operator), gradients(formula), strict=True):
        assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("role", "changes", "said"),
    [
        ("critic", {}, "critic.backend=exact has no use"),
        ("actor", {"model_type": "llama"}, "does not support llama models"),
        ("actor", {"hidden_size": 896, "num_attention_heads": 14}, "attention heads of 64"),
        ("actor", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scaled rotations"),
        ("actor", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "scaled rotations"),
        ("actor", {"use_sliding_window": True}, "sliding windows"),
    ],
)
def test_other_models_are_refused(role: str, changes: dict[str, Any], said: str) -> None:
    BACKEND.check("actor", FITTING)
    with pytest.raises(ConfigError, match=said):
        BACKEND.check(role, FITTING | changes)


def test_a_device_without_proof_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compute capability 9\.0"):
        BACKEND.prepare(network(exact=False), torch.device("cpu"), None)


def test_a_single_bit_between_actor_and_engine_is_named(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch.from_responses([[1], [1]], [[2, 3], [4]], [[-1.0, -2.0], [-3.0]])
    old_log_probs = batch.rollout_log_probs.clone()
    batch = batch.with_(old_log_probs=old_log_probs)
    old_log_probs[1, 1] = 7.0  # no token of a response
    with caplog.at_level("INFO"):
        check_exact(batch)
    assert "agree to the bit in all 3 log-probs" in caplog.text
    old_log_probs[0, 1] = torch.nextafter(torch.tensor(-2.0), torch.tensor(0.0))
    with pytest.raises(WorkerError, match="1 of 3 log-probs of the actor differ"):
        check_exact(batch)


def test_layers_hold_the_same_modules() -> None:
    """Checkpoints, exports and weights for the engines know the weights by Transformers' names."""
    made, plain = network(exact=True), network(exact=False)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in plain.named_parameters()]
