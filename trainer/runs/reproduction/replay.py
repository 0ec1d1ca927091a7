"""Runs a certified run again and compares weights and metrics."""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.custom_code import code_lines
from trainer.config.dpo import DpoConfig
from trainer.config.kto import KtoConfig
from trainer.config.offline import OfflineConfig
from trainer.config.sft import SftConfig
from trainer.config.tree import Config, RunConfig, WorkersConfig
from trainer.data.published.by_name import with_local_data
from trainer.errors import CertificateError, ConfigError, TrainerError
from trainer.models.files import with_local_models
from trainer.records.files.records import METRICS, METRICS_ROWS, read_records
from trainer.records.tracking import INTERRUPTED
from trainer.runs.offline.dpo import train_on_preferences
from trainer.runs.offline.kto import train_on_labels
from trainer.runs.offline.sft import fine_tune
from trainer.runs.ppo import train
from trainer.runs.reproduction.certificate import Certificate, Hardware, Input, differences, read_certificate
from trainer.runs.reproduction.inputs import hashed_input, named_paths
from trainer.runs.reproduction.surroundings import software
from trainer.runs.reproduction.verify import check_weights
from trainer.runs.reproduction.writer import Repeat

logger = logging.getLogger(__name__)

COMMANDS: dict[str, tuple[type[Config | OfflineConfig], Callable[[Any, Repeat], object]]] = {
    "train": (Config, train),
    "dpo": (DpoConfig, train_on_preferences),
    "kto": (KtoConfig, train_on_labels),
    "sft": (SftConfig, fine_tune),
}
# Metrics that depend on more than the settings.
_REPAIRS = ("rollout/repairs", "reward/repairs")
_USE = ("gpu/", "mfu/", "tflops/", "engines/", "waiting/", "idle/")
_MEMORY = ("memory/", "watchdog/memory_growth")
_OF_THE_MACHINE = ("step", "wall_time", "time/", "throughput/", "checkpoint/", "trainer/", *_MEMORY, *_USE, *_REPAIRS)
_GPU_MEMORY = "gpu_peak_gib"
_AFTER_UPDATE = ("rollout/synced_bytes", "validation/")
_SHOWN = 5


@dataclass(frozen=True)
class Replay:
    """A finished replay: its directory, the step compared, and each difference, those of the earliest step first."""

    run_dir: Path
    step: int
    weights: dict[str, str]
    differences: list[str]

    def lines(self) -> Iterator[str]:
        """The result, for a person."""
        yield str(self.run_dir)
        if not self.differences:
            yield f"equal: metrics of every step, and the weights after step {self.step}"
            yield from (f"  {role} {digest}" for role, digest in sorted(self.weights.items()))
            return
        yield f"different: {self.differences[0]}"
        yield from (f"  {line}" for line in self.differences[1:_SHOWN])
        if len(self.differences) > _SHOWN:
            yield f"  and {len(self.differences) - _SHOWN} more"


def replay(run_dir: Path, step: int | None = None, output: Path | None = None) -> Replay:
    """Runs a run's settings again, up to `step` or its last certified step, into `output`, a new directory.

    Raises CertificateError without a readable certificate, and ConfigError with every reason if the same weights cannot
    be expected: of the mode, the image, the data, the models or the hardware.
    """
    certificate = read_certificate(run_dir)
    last = _step(run_dir, certificate, step)
    target = (output or run_dir.with_name(f"{run_dir.resolve().name}-replay")).absolute()
    if target.exists():
        raise ConfigError(f"{target} exists", hint="name a new directory with --output")
    kind, run = COMMANDS.get(certificate.command, (None, None))
    if kind is None or run is None:
        raise CertificateError(f"{run_dir}: runs of `{certificate.command}` are unknown", hint="use its own version")
    settings = settings_of(kind, certificate, run_dir, target)
    _refuse_unequal(run_dir, certificate, settings)
    for line in (*reservations(settings, certificate.hardware), *_lowered(certificate, last)):
        logger.warning("warning: %s", line)
    try:
        run(settings, Repeat(certificate.hardware, last))
    except ConfigError:
        shutil.rmtree(target, ignore_errors=True)  # a refused replay leaves nothing
        raise
    return compare(run_dir, certificate, target, last)


def compare(run_dir: Path, certificate: Certificate, target: Path, step: int) -> Replay:
    """Compares metrics and weights of a run and its replay up to a step. Raises CertificateError."""
    repeated = read_certificate(target)
    unequal = [(at, line) for at, line in (*_limits(certificate, repeated), *_metrics(run_dir, target)) if at <= step]
    for at in (at for at in certificate.steps if at <= step):
        ours, theirs = certificate.weights(at), repeated.weights(at)
        unequal += [
            (at, f"step {at}: weights of {role}: {ours[role]} / {theirs[role]}")
            for role in sorted({*ours} & {*theirs})
            if ours[role] != theirs[role]
        ]
    compared = {role: digest for role, digest in repeated.weights(step).items() if role in certificate.weights(step)}
    if not compared:
        raise CertificateError(
            f"{target}: the replay recorded no weights of step {step}", hint="see its warnings; set trainer.save_freq"
        )
    return Replay(target, step, compared, [line for _, line in sorted(unequal, key=lambda item: item[0])])


def _lowered(certificate: Certificate, last: int) -> Iterator[str]:
    """The steps up to the last in which the run took a pass again, which a replay has to do as well."""
    for step, limits in sorted(certificate.lowered.items()):
        if step <= last:
            yield (
                f"in step {step} the GPU's memory was full, and the run went on with {' and '.join(limits)}; the "
                "replay has the same bits if its memory is full in the same passes"
            )


def _step(run_dir: Path, certificate: Certificate, step: int | None) -> int:
    steps = certificate.steps
    if not steps:
        raise CertificateError(
            f"{run_dir}: its certificate names no weights: no checkpoint and no model was complete",
            hint="set trainer.save_freq in runs that are to be replayed",
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ConfigError(f"{run_dir}: no weights of step {step} are certified", hint=f"--step is one of {known}")
    return steps[-1] if step is None else step


def settings_of(
    kind: type[Config | OfflineConfig], certificate: Certificate, run_dir: Path, target: Path
) -> Config | OfflineConfig:
    """The settings to run. They write into `target`, a directory of their own, and to no logger.

    Raises ConfigError if they do not fit this version.
    """
    given = dict(certificate.given)
    origin = str(run_dir.absolute() / certificate.origin.path) if certificate.origin is not None else None
    replaced: dict[str, Any] = {
        "output_dir": str(target.parent),
        "run_id": target.name,
        "resume": origin,
        "loggers": [],
    }
    trainer = {**given.get("trainer", {}), **replaced}
    for section in ("trajectories", "profiler"):
        if isinstance(values := trainer.get(section), dict):
            trainer[section] = {name: value for name, value in values.items() if name not in ("dir", "validation_dir")}
    given["trainer"] = trainer
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"the certificate's settings are refused: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            hint="use the version that wrote them",
        ) from error


def _refuse_unequal(run_dir: Path, certificate: Certificate, settings: Config | OfflineConfig) -> None:
    """Raises ConfigError with every reason why the same weights cannot be expected."""
    reasons = [*obstacles(settings), *certificate.changes]
    if certificate.origin is not None:
        reasons += check_weights(run_dir, certificate.origin)
    workers = settings.for_workers() if isinstance(settings, OfflineConfig) else settings
    local = with_local_data(with_local_models(workers))
    recorded = settings if isinstance(settings, OfflineConfig) else local
    now = certificate.model_copy(
        update={
            "software": software(),
            "hardware": None,  # known once Ray answers
            "inputs": _inputs(local),
            "settings": recorded.model_dump(mode="json"),
        }
    )
    reasons += differences(certificate, now)
    if reasons:
        listed = "".join(f"\n  {line}" for line in reasons)
        raise ConfigError(
            f"{run_dir} cannot be repeated exactly here:{listed}",
            hint="restore the image, the files and the machine of that run; `verify` names changed files, too",
        )


def _inputs(settings: WorkersConfig) -> dict[str, Input]:
    try:
        return {setting: hashed_input(path) for setting, path in named_paths(settings) if path.exists()}
    except OSError as error:
        raise TrainerError(f"an input cannot be read: {error}", hint="make it readable") from error


def _limits(ours: Certificate, theirs: Certificate) -> Iterator[tuple[int, str]]:
    """Each step in which one of both lowered other limits than the other."""
    for step in sorted({*ours.lowered, *theirs.lowered}):
        before, now = (" and ".join(certified.lowered.get(step, ["none"])) for certified in (ours, theirs))
        if before != now:
            yield step, f"step {step}: limits that were lowered for lack of memory: {before} / {now}"


def _metrics(run_dir: Path, target: Path) -> Iterator[tuple[int, str]]:
    """Each metric that differs, with its step; only steps that both recorded count, as far as neither was interrupted
    before it measured the metric."""
    ours, theirs = (
        {int(row["step"]): row for row in read_records(directory / METRICS, METRICS_ROWS, logger.warning)}
        for directory in (run_dir, target)
    )
    for step in sorted({*ours} & {*theirs}):
        before, now = ours[step], theirs[step]
        for name in sorted({*before, *now}):
            if name.startswith(_OF_THE_MACHINE) or name.endswith(_GPU_MEMORY):
                continue
            values = f"{before.get(name)} / {now.get(name)}"
            equal = str(before.get(name)) == str(now.get(name))  # unlike ==, of nan too
            if not equal and not any(_interrupted_before(name, row) for row in (before, now)):
                yield step, f"step {step}: {name}: {values}"


def _interrupted_before(name: str, row: Mapping[str, float]) -> bool:
    """Whether a run failed in a step before it measured a metric. It goes on with the next step."""
    return INTERRUPTED in row and name not in row and name.startswith(_AFTER_UPDATE)


def obstacles(settings: RunConfig) -> Iterator[str]:
    """Each reason why a run of these settings has other weights each time."""
    if settings.trainer.mode == "asynchronous":
        yield "trainer.mode=asynchronous: the timing of engines and learner decides which weights sample a token"


def reservations(settings: RunConfig, hardware: Hardware | None) -> Iterator[str]:
    """Each reason why a run of these settings may have other weights, although nothing differs."""
    names = {device for devices in (hardware.devices if hardware else {}).values() for device in devices}
    if any("threads" not in name for name in names) and not settings.trainer.deterministic:
        yield (
            "kernels on GPUs may add numbers in another order: differences by rounding are possible without "
            "trainer.deterministic"
        )
    for line in code_lines(settings):
        yield f"{line}: the same weights need the same answers of it"
    if isinstance(settings, Config):
        yield from _order_of_answers(settings)


def _order_of_answers(settings: Config) -> Iterator[str]:
    rollout, together = settings.rollout, settings.trainer.deterministic
    setting = None
    if rollout.uses_endpoint:
        setting = (
            f"rollout.environment={rollout.environment.hub}" if rollout.environment.hub else "rollout.agent=program"
        )
    elif rollout.agent == "tools" and not together:
        setting = "rollout.agent=tools without trainer.deterministic"
    elif rollout.environment.path is not None and not together:
        setting = "rollout.environment without trainer.deterministic"
    if setting:
        yield f"{setting}: the order in which conversations are answered decides what an engine computes together"
