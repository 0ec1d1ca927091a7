"""What a step does with its hardware: FLOP/s of the passes, busy and idle devices, full and empty engines, traces.

Nothing here fails a run: what cannot be measured is missing from the metrics.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.cluster.calls import wait
from trainer.cluster.monitors import GpuMonitors
from trainer.cluster.timeline import Busy, Timeline, Waiting
from trainer.cluster.workers import WorkerGroup
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import WorkersConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.shared_prompts import SharedPrompts
from trainer.planning.chips import dense_bf16_flops
from trainer.planning.flops import Rows, explains_parameters, forward_flops, update_flops
from trainer.planning.memory import model_of
from trainer.planning.model_size import ModelSize
from trainer.records.profiling import SlowPhases
from trainer.records.tracking import Tracker
from trainer.rollout.engines import EngineWork, EngineWorker
from trainer.runs.interfaces import TrainingRole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """A pass of a role over a batch: forward, or its optimizer steps if there is a mini-batch size."""

    phase: str
    role: str
    batch: Batch
    mini_batch_size: int | None
    seconds: float


class Efficiency:
    """Measures the steps of a run: each inside `measured`, with its passes inside `computing`.

    `waiting` says for whom the workers of each role waited in the last step.
    """

    def __init__(
        self,
        config: WorkersConfig,
        training: Sequence[WorkerGroup[TrainingRole]],
        engines: WorkerGroup[EngineWorker] | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.waiting: Mapping[str, Waiting] = {}
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
        self._passes: list[Pass] = []
        self._work: EngineWork | None = None
        self._generating: float | None = None

    @contextmanager
    def measured(self, metrics: dict[str, float]) -> Iterator[None]:
        """Measures the step inside; adds its metrics."""
        self._passes = []
        self._work, self._generating = None, None
        self.timeline.begin()
        yield
        busy = self.timeline.since_begin()
        self.waiting = busy.waiting
        metrics |= {
            **self._of_passes(),
            **gpu_metrics(self._monitors.utilization(busy.seconds)),
            **{f"waiting/{role}": waiting.seconds for role, waiting in busy.waiting.items()},
            **{f"idle/{group.role}": busy.idle(_devices(group)) for group in self._groups},
            **(self._of_engines(busy, self._work) if self._work else {}),
        }
        self._passes = []  # which hold the batches

    @contextmanager
    def computing(self, phase: str, role: str, batch: Batch, mini_batch_size: int | None = None) -> Iterator[None]:
        """Times a pass of a role over a batch: forward, or the role's optimizer steps with this mini-batch size."""
        started = time.perf_counter()
        yield
        self._passes.append(Pass(phase, role, batch, mini_batch_size, time.perf_counter() - started))

    def engines_did(self, work: EngineWork, generating: float | None) -> None:
        """Adds what the engines did; `generating` are the seconds in which the step waited for them, None if they
        sample beside it."""
        self._work, self._generating = work, generating

    def _of_passes(self) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        flops: dict[str, float] = defaultdict(float)  # of a rank
        metrics = {}
        prompts: dict[tuple[int, int], SharedPrompts] = {}  # of the same tensors, which most passes have in common
        for measured in self._passes:
            if (size := self._sizes.get(measured.role)) is None:
                continue
            tensors = id(measured.batch.token_ids), id(measured.batch.response_mask)
            if tensors not in prompts:
                prompts[tensors] = measured.batch.shared_prompts()
            seconds[measured.phase] += measured.seconds
            flops[measured.phase] += self._flops(size, measured, prompts[tensors]) / self._ranks[measured.role]
            metrics[f"tflops/{measured.phase}"] = flops[measured.phase] / seconds[measured.phase] / 1e12
            if rate := self._chips.get(measured.role):
                metrics[f"mfu/{measured.phase}"] = flops[measured.phase] / seconds[measured.phase] / rate
        return metrics

    def _flops(self, size: ModelSize, measured: Pass, prompts: SharedPrompts) -> float:
        settings = self._config.critic if measured.role == "critic" else self._config.actor
        head_tokens = 0 if measured.role == "critic" else int(measured.batch.response_mask.sum())
        rows = Rows.of(prompts, head_tokens, settings.share_prompts, measured.mini_batch_size)
        if measured.mini_batch_size is None:
            return forward_flops(size, rows)
        return settings.ppo_epochs * update_flops(size, rows, frozen=settings.lora.rank > 0)

    def _of_engines(self, busy: Busy, work: EngineWork) -> dict[str, float]:
        generating = self._generating
        workers = next(len(group) for group in self._groups if group.role == "rollout")
        metrics = work.occupancy.metrics(self._config.rollout.max_num_seqs)
        seconds = busy.of_workers("rollout", "generate")
        seconds += [0.0] * (workers - len(seconds))
        window = busy.seconds if generating is None else generating
        if window > 0 and max(seconds) > 0:
            metrics["engines/busy"] = min(1.0, fmean(seconds) / window)
            metrics["engines/busy_lowest"] = min(1.0, min(seconds) / window)
            metrics["engines/imbalance"] = max(seconds) / fmean(seconds)
        if work.tokens and work.occupancy.drafted_tokens:
            metrics["engines/drafted_share"] = work.occupancy.accepted_tokens / work.tokens
        window = work.seconds if generating is None else generating
        if window > 0:
            metrics["throughput/generated_tokens_per_second"] = work.tokens / window
        return metrics


def gpu_metrics(shares: Sequence[float]) -> dict[str, float]:
    """Metrics of the utilisation of each GPU; empty without any."""
    return {"gpu/utilization": fmean(shares), "gpu/utilization_lowest": min(shares)} if shares else {}


def _devices(group: WorkerGroup[Any]) -> set[tuple[str, int]]:
    return {(slot.node.id, slot.rank) for slot in group.slots}


class Traces:
    """Traces the steps that the profiler's settings select; with the profiler on, logs slow phases of every step."""

    def __init__(
        self, settings: TrainerConfig, run_dir: Path, groups: Sequence[WorkerGroup[TrainingRole]], tracker: Tracker
    ) -> None:
        self._settings, self._timeout = settings.profiler, settings.worker_timeout
        self._directory = settings.profiler.dir or run_dir / "traces"
        self._groups, self._tracker = groups, tracker
        self._slow_phases = SlowPhases(settings.profiler)

    @contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Traces the step inside, if it is one of those selected."""
        selected = self._settings.enable and step in self._settings.steps
        if selected:
            wait([call for group in self._groups for call in group.start(TrainingRole.start_trace)], self._timeout)
        yield
        if selected:
            for group in self._groups:
                group.call(TrainingRole.stop_trace, self._directory, step, group.role)
            logger.info("traces of step %d in %s", step, self._directory)
        if self._settings.enable:
            for slow in self._slow_phases.of_step(self._tracker.seconds):
                logger.warning("step %d: %s", step, slow)
