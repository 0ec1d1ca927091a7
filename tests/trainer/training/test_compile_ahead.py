"""What is compiled before the first step serves every step after it."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from tests.trainer.models.test_log_probs_by_family import PACKED, TEMPERATURE, language_model
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.exact.layers import use_operators
from trainer.models.exact.operators import FORMULAS
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.training.compile_ahead import compile_ahead, typical_rows
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler looks at it
]
VOCABULARY = 50


class Compilations:
    """A compiler that changes nothing and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return make_boxed_func(graph.forward)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # the image for CPUs switches it off
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep 10 MB of it
    torch._dynamo.reset()
    counter = Compilations()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(fw_compiler=counter)))
    return counter


def rows(prompts: list[list[int]], lengths: list[int]) -> Batch:
    return Batch.from_responses(prompts, [[7] * length for length in lengths], None)


def loss(output: Any, batch: Batch, _count: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    total = (output[0] if isinstance(output, tuple) else output).sum()
    return total, {"loss": total}


@pytest.mark.parametrize(
    ("network", "family", "shares", "checkpointing"),
    [
        (partial(PolicyNetwork, temperature=TEMPERATURE), "qwen2", True, False),
        (partial(PolicyNetwork, temperature=TEMPERATURE), "gemma2", False, True),
        (ValueNetwork, "qwen3", False, False),
    ],
)
def test_no_later_pass_compiles_again(
    compilations: Compilations, network: Callable[..., nn.Module], family: str, shares: bool, checkpointing: bool
) -> None:
    execution = Execution(
        torch.device("cpu"), torch.bfloat16, compile_layers=True, checkpoint_activations=checkpointing
    )
    engine = TrainingEngine(network(language_model(family)), execution, OptimizerSettings(1e-3, 0.0, 1.0))
    before = {name: weight.clone() for name, weight in engine.full_weights(engine.network.decoder)}
    compile_ahead(engine, typical_rows(VOCABULARY, 40, 600, 1000, shares))
    ahead = compilations.count
    assert ahead > 0
    assert all(weight.equal(before[name]) for name, weight in engine.full_weights(engine.network.decoder))
    for lengths in ([5, 9, 300], [700, 2, 3], [257, 1000, 512]):
        prompts = [[3, 4, 5]] * 3 if shares else [[3, 4], [5, 6, 7], [8]]
        engine.forward(rows(prompts, lengths), MicroBatchLimit(3))
        engine.update(rows(prompts, lengths), loss, MicroBatchLimit(3))
    assert compilations.count == ahead


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("prompt", "response"), [(4, 1), (40, 600), (512, 300), (512, 2048), (1024, 8192)])
def test_typical_rows_fill_a_pass_with_rows_that_a_run_may_have(prompt: int, response: int, shares: bool) -> None:
    rows = typical_rows(100_000, prompt, response, 4096, shares)
    shared = rows.shared_prompts()
    packed = sum(shared.cost(group) for group in shared.groups) if shares else int(rows.lengths.sum())
    assert 4096 <= packed < 4096 + 2 * (prompt + response)
    assert int(rows.prompt_lengths.max()) == prompt
    assert int((rows.lengths - rows.prompt_lengths).max()) <= response
    assert len(shared.groups) == (1 if shares else len(rows))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of OPT, whose layers return a view in every pass
@pytest.mark.parametrize("family", sorted(PACKED))
def test_the_layers_of_every_family_compute_by_themselves(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler: what it would be given must be right for each of them."""
    monkeypatch.setattr(nn.Module, "compile", lambda _layer, **_: None)
    execution = Execution(torch.device("cpu"), torch.float32, compile_layers=True)
    engine = TrainingEngine(
        PolicyNetwork(language_model(family), TEMPERATURE), execution, OptimizerSettings(1e-3, 0.0, 1.0)
    )
    assert_layers_compute_by_themselves(engine)


def assert_layers_compute_by_themselves(engine: TrainingEngine) -> None:
    compile_ahead(engine, typical_rows(VOCABULARY, 5, 9, 50, share_prompt=True))
    assert all(weight.grad is None for weight in engine.network.parameters())
    engine.update(rows([[3, 4, 5]] * 2, [5, 9]), loss, MicroBatchLimit(2))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_exact_layers_compute_by_themselves(checkpointing: bool) -> None:
    network = PolicyNetwork(language_model("qwen2"), TEMPERATURE)
    use_operators(network, FORMULAS)
    execution = Execution(torch.device("cpu"), torch.float32, checkpoint_activations=checkpointing)
    assert_layers_compute_by_themselves(TrainingEngine(network, execution, OptimizerSettings(1e-3, 0.0, 1.0)))
