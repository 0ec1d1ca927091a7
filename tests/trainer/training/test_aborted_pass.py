"""A pass that lacks memory, which a mock says on CPU, is taken again by a single rank with the same result."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing import assert_close

from tests.trainer.models.test_log_probs_by_family import TEMPERATURE, language_model, rows
from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.errors import LoweredLimit, MemoryFullError
from trainer.models.networks import PolicyNetwork
from trainer.roles.worker import MOST_RETRIES, TrainingWorker
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(params=["torch resets", "we reset"])
def _resets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before 2.13 cannot reset itself."""
    if request.param == "we reset":
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)


@dataclass
class FullMemory:
    """A mock: memory is full in these calls of a layer, counted from 0 over all micro-batches."""

    failing: set[int]
    calls: int = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. Of the allocated memory, …")

    def in_forward(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(self)

    def in_backward(self, layer: nn.Module) -> None:
        layer.register_full_backward_hook(self)


def worker(
    dtype: torch.dtype = torch.float32, checkpointing: bool = False, ranks: int = 1, **actor: object
) -> TrainingWorker:
    count = len(rows())
    sections = {
        "data": {"train_batch_size": count},
        "actor": {"micro_batch_size": 6, "mini_batch_size": count, **actor},
        "critic": {"mini_batch_size": count},
    }
    config = Config.model_validate(sections)
    made = TrainingWorker(config, RankPlace(0, ranks, "127.0.0.1", "cpu"))
    made.engine = TrainingEngine(
        PolicyNetwork(language_model("qwen2"), TEMPERATURE),
        Execution(torch.device("cpu"), dtype, checkpoint_activations=checkpointing),
        OptimizerSettings(1e-2, 0.0, 1.0),
    )
    return made


def loss(output: tuple[Tensor, Tensor], batch: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
    value = aggregate(-output[0], batch.response_mask, "token-mean", count)
    return value, {"loss": value}


def updated(trained: TrainingWorker) -> dict[str, Tensor]:
    """The weights after two updates."""
    for _ in range(2):
        trained.take_steps(rows(), [len(rows())], loss)
    return {name: weight.full_tensor() for name, weight in trained.engine.network.named_parameters()}


@pytest.mark.usefixtures("_resets")
@pytest.mark.parametrize(("dtype", "checkpointing"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("place", [FullMemory.in_forward, FullMemory.in_backward])
@pytest.mark.parametrize(("failing", "last_limit"), [({0}, 3), ({1, 3}, 1)])
def test_an_update_with_mocked_full_memory_learns_the_same(
    dtype: torch.dtype,
    checkpointing: bool,
    place: Callable[[FullMemory, nn.Module], None],
    failing: set[int],
    last_limit: int,
) -> None:
    small = worker(dtype, checkpointing)
    place(FullMemory(failing), small.engine.network.decoder.layers[0])
    expected = updated(worker(dtype, checkpointing, micro_batch_size=last_limit))
    assert_close(updated(small), expected, rtol=0, atol=0)
    halvings = [LoweredLimit("actor.micro_batch_size", 6, 3), LoweredLimit("actor.micro_batch_size", 3, 1)]
    assert small.take_lowered() == halvings[: len(failing)]
    assert small.take_lowered() == []


@pytest.mark.usefixtures("_resets")
def test_log_probs_with_mocked_full_memory_are_the_same_and_the_limit_stays_low() -> None:
    small, expected = worker(), worker().forward(rows())
    memory = FullMemory({1})
    memory.in_forward(small.engine.network.decoder.layers[-1])
    assert_close(small.forward(rows()), expected)
    assert small.take_lowered() == [LoweredLimit("actor.micro_batch_size", 6, 3)]
    calls = memory.calls
    small.forward(rows())
    assert memory.calls - calls == 3


def test_retries_with_mocked_full_memory_have_a_limit() -> None:
    small = worker(micro_batch_tokens=10_000)
    small.engine.lowered = lambda _, limit: replace(limit, tokens=limit.value - 1)
    memory = FullMemory(set(range(100)))
    memory.in_forward(small.engine.network.decoder.layers[0])
    with pytest.raises(MemoryFullError):
        small.forward(rows())
    assert memory.calls == MOST_RETRIES + 1


@pytest.mark.parametrize(
    ("settings", "lowered"),
    [
        ({"micro_batch_size": 1}, None),  # one row cannot be split
        ({"policy_loss": "clip_cov"}, None),  # a loss that depends on the micro-batch keeps its limit
        ({"ranks": 2, "micro_batch_tokens": 10_000}, LoweredLimit("actor.micro_batch_tokens", 10_000, 24)),
    ],
    ids=["a single row", "a loss of the micro-batch", "one of several ranks"],
)
def test_mocked_full_memory_that_a_pass_cannot_repeat_is_an_error(
    settings: dict[str, Any], lowered: LoweredLimit | None
) -> None:
    """One of several ranks leaves the retry to the run."""
    small = worker(**settings)
    FullMemory({0}).in_forward(small.engine.network.decoder.layers[0])
    with pytest.raises(MemoryFullError, match="the GPU's memory is full: CUDA out of memory") as caught:
        small.forward(rows())
    assert caught.value.lowered == lowered
    assert small.take_lowered() == []
