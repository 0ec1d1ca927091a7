"""What a step does with its hardware, measured around played passes: no worker, known seconds, GPUs by name only."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.planning.sizes import write_sizes
from trainer.cluster.nodes import ClusterNode, Slot
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.planning.flops import Rows, forward_flops, update_flops
from trainer.planning.model_size import ModelSize
from trainer.rollout.engines import EngineWork
from trainer.rollout.occupancy import Load, Occupancy
from trainer.runs import efficiency
from trainer.runs.efficiency import Efficiency, gpu_metrics

H100 = "NVIDIA H100 80GB HBM3"


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(efficiency, "time", clock)
    monkeypatch.setattr(efficiency, "GpuMonitors", lambda _groups: SimpleNamespace(utilization=lambda _: [0.9, 0.5]))
    return clock


def group(role: str, ranks: int, device_kind: str = H100) -> Any:
    """A role whose workers need not exist."""
    slots = [
        Slot(rank, ClusterNode("n", "n", 8, ranks), "cuda", rank, ranks, None)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    workers = [SimpleNamespace(spec=SimpleNamespace(slot=slot)) for slot in slots]

    class Group:
        def __init__(self) -> None:
            self.role, self.slots, self.workers = role, slots, workers

        def __len__(self) -> int:
            return ranks

        def call_one(self, *_: object) -> str:
            return device_kind

    return Group()


def settings(model: Path, **changes: Any) -> Config:
    return Config.model_validate({"model": {"path": model}, **changes})


def batch() -> Batch:
    return Batch.from_responses([[1] * 100] * 4, [[2] * 50] * 4, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sizes("0.5B", tmp_path / "model")


@dataclass(frozen=True)
class PlayedPass:
    phase: str
    role: str
    seconds: float
    mini_batch_size: int | None = None
    batch: Batch = field(default_factory=batch)


def step(efficiency: Efficiency, clock: Clock, *passes: PlayedPass) -> dict[str, float]:
    """The metrics of a step with these passes."""
    metrics: dict[str, float] = {}
    with efficiency.measured(metrics):
        for played in passes:
            with efficiency.computing(played.phase, played.role, played.batch, played.mini_batch_size):
                clock.now += played.seconds
    return metrics


def test_mfu_is_needed_operations_by_seconds_ranks_and_the_chips_rate_mocked(clock: Clock, model: Path) -> None:
    measured = Efficiency(settings(model, actor={"ppo_epochs": 3}), [group("actor", 4), group("critic", 2)])
    size = ModelSize.read(model)
    assert size is not None
    metrics = step(
        measured,
        clock,
        PlayedPass("old_log_prob", "actor", 2.0),
        PlayedPass("update_actor", "actor", 5.0, mini_batch_size=2),
        PlayedPass("values", "critic", 1.0),
    )
    prompts = batch().shared_prompts()
    forward = forward_flops(size, Rows.of(prompts, 200, share_prompts=True))
    update = 3 * update_flops(size, Rows.of(prompts, 200, True, mini_batch_size=2))
    assert metrics["mfu/old_log_prob"] == pytest.approx(forward / (2.0 * 4 * 989e12))
    assert metrics["mfu/update_actor"] == pytest.approx(update / (5.0 * 4 * 989e12))
    assert metrics["tflops/update_actor"] == pytest.approx(update / (5.0 * 4 * 1e12))
    values = forward_flops(size, Rows.of(prompts, 0, True))  # a critic has no head over the vocabulary
    assert metrics["mfu/values"] == pytest.approx(values / (1.0 * 2 * 989e12))


def test_passes_of_the_same_phase_add_up_and_a_new_step_starts_from_none_mocked(clock: Clock, model: Path) -> None:
    measured = Efficiency(settings(model), [group("actor", 1)])
    short, long = PlayedPass("reference", "actor", 1.0), PlayedPass("reference", "actor", 3.0)
    once = step(measured, clock, short)["mfu/reference"]
    assert step(measured, clock, short, long)["mfu/reference"] == pytest.approx(2 * once / 4)
    assert "mfu/reference" not in step(measured, clock)


def test_what_is_unknown_is_absent_mocked(clock: Clock, model: Path, tmp_path: Path) -> None:
    unknown_chip = Efficiency(settings(model), [group("actor", 1, "Some New Chip")])
    metrics = step(unknown_chip, clock, PlayedPass("old_log_prob", "actor", 1.0))
    assert "tflops/old_log_prob" in metrics
    assert "mfu/old_log_prob" not in metrics
    other = write_sizes("7B", tmp_path / "other")
    (other / "config.json").write_text((model / "config.json").read_text())  # sizes that do not explain the weights
    mixture = Efficiency(settings(other), [group("actor", 1)])
    metrics = step(mixture, clock, PlayedPass("old_log_prob", "actor", 1.0))
    assert not [name for name in metrics if name.startswith(("mfu/", "tflops/"))]


def test_adapters_need_fewer_operations_mocked(clock: Clock, model: Path) -> None:
    mfu = {}
    for rank in (0, 8):
        measured = Efficiency(settings(model, actor={"lora": {"rank": rank}}), [group("actor", 1)])
        update = PlayedPass("update_actor", "actor", 1.0, mini_batch_size=4)
        mfu[rank] = step(measured, clock, update)["mfu/update_actor"]
    assert 2 / 3 < mfu[8] / mfu[0] < 0.7


def test_engines_are_measured_within_the_generation_phase_or_all_the_time_mocked(clock: Clock, model: Path) -> None:
    assert clock.now == 0.0
    engines = group("rollout", 2)
    measured = Efficiency(settings(model, rollout={"max_num_seqs": 8}), [group("actor", 2)], engines)
    occupancy = Occupancy.of([Load(6, 60, 0.5)], [], []) + Occupancy(drafted_tokens=400, accepted_tokens=250)
    for generating, window in ((10.0, 10.0), (None, 40.0)):
        metrics: dict[str, float] = {}
        with measured.measured(metrics):
            measured.engines_did(EngineWork(occupancy, tokens=1000, seconds=40.0), generating)
        assert metrics["throughput/generated_tokens_per_second"] == 1000 / window
        assert metrics["engines/running_share"] == 6 / 8
        assert metrics["engines/accepted_share"] == 250 / 400
        assert metrics["engines/drafted_share"] == 250 / 1000
        assert "engines/busy" not in metrics  # no call was recorded
    assert metrics["gpu/utilization"] == 0.7
    assert metrics["gpu/utilization_lowest"] == 0.5
    assert {"idle/actor", "idle/rollout"} <= metrics.keys()


def test_a_run_without_gpus_has_no_utilisation() -> None:
    assert gpu_metrics([]) == {}


def test_tokens_that_the_policy_did_not_sample_need_no_head_mocked(clock: Clock, model: Path) -> None:
    size = ModelSize.read(model)
    assert size is not None
    whole = batch()
    answered = whole.with_(response_mask=whole.response_mask & (torch.arange(50) >= 25))
    measured = Efficiency(settings(model), [group("actor", 1)])
    tflops = [
        step(measured, clock, PlayedPass("old_log_prob", "actor", 1.0, batch=rows))["tflops/old_log_prob"]
        for rows in (whole, answered)
    ]
    assert tflops[0] - tflops[1] == pytest.approx(2 * size.hidden * size.vocabulary * 100 / 1e12)
