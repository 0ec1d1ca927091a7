"""What a step does with its hardware: FLOP/s of the passes, busy and idle devices, full and empty engines.

Nothing here fails a run: what cannot be measured is missing from the metrics.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trainer.cluster.monitors import GpuMonitors
from trainer.cluster.timeline import Busy, Timeline, Waiting
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.planning.chips import dense_bf16_flops
from trainer.planning.flops import Rows, explains_parameters, forward_flops, update_flops
from trainer.planning.memory import model_of
from trainer.planning.model_size import ModelSize
from trainer.rollout.engines import EngineWork, EngineWorker
from trainer.runs.interfaces import TrainingRole


@dataclass(frozen=True)
class StepUse:
    """The metrics of a step, and for whom the workers of each role waited in it."""

    metrics: Mapping[str, float]
    waiting: Mapping[str, Waiting]


class Efficiency:
    """Measures the steps of a run: `begin`, then passes inside `computing`, then `measure`."""

    def __init__(
        self,
        config: Config,
        training: Sequence[WorkerGroup[TrainingRole]],
        engines: WorkerGroup[EngineWorker] | None = None,
    ) -> None:
        self.timeline = Timeline()
        self._config = config
        self._groups: list[WorkerGroup[Any]] = [*training, *([engines] if engines else [])]
        self._monitors = GpuMonitors(self._groups)
        sizes = {group.role: ModelSize.read(model_of(config, group.role)) for group in training}
        self._sizes = {role: size for role, size in sizes.items() if size is not None and explains_parameters(size)}
        self._ranks = {group.role: len(group) for group in training}
        self._chips = {
            group.role: dense_bf16_flops(group.call_one(0, TrainingRole.device_kind))
            for group in training
            if group.slots[0].device == "cuda"
        }
        # By phase: the role, seconds, and operations of one rank.
        self._passes: dict[str, tuple[str, float, float]] = {}
        self._work: EngineWork | None = None
        self._generating: float | None = None

    def begin(self) -> None:
        """Begins a step."""
        self._passes = {}
        self._work, self._generating = None, None
        self.timeline.begin()

    @contextmanager
    def computing(self, phase: str, role: str, batch: Batch, mini_batch_size: int | None = None) -> Iterator[None]:
        """Times a pass of a role over a batch: forward, or the role's optimizer steps with this mini-batch size."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if (size := self._sizes.get(role)) is None:
            return
        _, before, flops = self._passes.get(phase, (role, 0.0, 0.0))
        flops += self._flops(size, role, batch, mini_batch_size) / self._ranks[role]
        self._passes[phase] = (role, before + seconds, flops)

    def _flops(self, size: ModelSize, role: str, batch: Batch, mini_batch_size: int | None) -> float:
        settings = self._config.critic if role == "critic" else self._config.actor
        rows = Rows.of(batch, settings.share_prompts, mini_batch_size, has_head=role != "critic")
        if mini_batch_size is None:
            return forward_flops(size, rows)
        return settings.ppo_epochs * update_flops(size, rows, frozen=settings.lora.rank > 0)

    def engines_did(self, work: EngineWork, generating: float | None) -> None:
        """Adds what the engines did; `generating` are the seconds in which the step waited for them, None if they
        sample beside it."""
        self._work, self._generating = work, generating

    def measure(self) -> "StepUse":
        """The step, which ends now."""
        busy = self.timeline.since_begin()
        metrics = {
            **self._of_passes(),
            **gpu_metrics(self._monitors.utilization(busy.seconds)),
            **{f"waiting/{role}": waiting.seconds for role, waiting in busy.waiting.items()},
            **{f"idle/{group.role}": busy.idle(_devices(group)) for group in self._groups},
            **(self._of_engines(busy, self._work) if self._work else {}),
        }
        return StepUse(metrics, busy.waiting)

    def _of_passes(self) -> dict[str, float]:
        found = {}
        for phase, (role, seconds, flops) in self._passes.items():
            found[f"tflops/{phase}"] = flops / seconds / 1e12
            if rate := self._chips.get(role):
                found[f"mfu/{phase}"] = flops / seconds / rate
        return found

    def _of_engines(self, busy: Busy, work: EngineWork) -> dict[str, float]:
        generating = self._generating
        workers = next(len(group) for group in self._groups if group.role == "rollout")
        found = work.occupancy.metrics(self._config.rollout.max_num_seqs)
        seconds = busy.of_workers("rollout", "generate")
        seconds += [0.0] * (workers - len(seconds))
        window = busy.seconds if generating is None else generating
        if window > 0 and max(seconds) > 0:
            found["engines/busy"] = min(1.0, fmean(seconds) / window)
            found["engines/busy_lowest"] = min(1.0, min(seconds) / window)
            found["engines/imbalance"] = max(seconds) / fmean(seconds)
        window = work.seconds if generating is None else generating
        if window > 0:
            found["throughput/generated_tokens_per_second"] = work.tokens / window
        return found


def gpu_metrics(shares: Sequence[float]) -> dict[str, float]:
    """Metrics of the utilisation of each GPU; empty without any."""
    return {"gpu/utilization": fmean(shares), "gpu/utilization_lowest": min(shares)} if shares else {}


def _devices(group: WorkerGroup[Any]) -> set[tuple[str, int]]:
    return {(slot.node.id, slot.rank) for slot in group.slots}
