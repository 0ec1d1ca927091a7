"""Writes the certificate of a run while it trains. A thread hashes files and weights."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import RunConfig
from trainer.errors import CertificateError, CheckpointError, ConfigError, LoweredLimit
from trainer.records.files.checksums import sha256
from trainer.runs.checkpoints.checkpoint import checkpoint_step
from trainer.runs.checkpoints.manifest import STATE_FILE
from trainer.runs.interfaces import TrainingRole
from trainer.runs.reproduction.certificate import (
    CERTIFICATE,
    Certificate,
    Hardware,
    Input,
    Weights,
    differences,
    read_certificate,
    write_certificate,
)
from trainer.runs.reproduction.digests import checkpoint_weights, model_weights
from trainer.runs.reproduction.inputs import hashed_input, named_paths
from trainer.runs.reproduction.surroundings import software

logger = logging.getLogger(__name__)

FINISHED_SECONDS = 3600.0  # for the hashing of a large model that a run has written
FAILED_SECONDS = 5.0  # that a failed run waits for the hashing


@dataclass(frozen=True)
class Repeat:
    """What a replay repeats: a run on this hardware, up to this step."""

    hardware: Hardware | None
    step: int


class CertificateWriter:
    """Keeps certificate.json up to date; a context manager that waits for the last digest.

    `given` are the user's own settings, `recorded` those in config.json, `local` those whose paths name local files.
    """

    def __init__(
        self, run_dir: Path, given: RunConfig, recorded: RunConfig, local: RunConfig, repeat: Repeat | None = None
    ) -> None:
        self._run_dir, self._repeat = run_dir, repeat
        self._paths = list(named_paths(local))
        self._certificate = Certificate(
            command=given.command,
            run=run_dir.resolve().name,
            seed=given.trainer.seed,
            software=software(),
            given=given.model_dump(mode="json", exclude_unset=True),
            settings=recorded.model_dump(mode="json"),
        )
        self._jobs: SimpleQueue[Callable[[], dict[str, Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="certificate", daemon=True)
        self._seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(FINISHED_SECONDS if error is None else FAILED_SECONDS)
            if self._thread.is_alive() and error is None:
                logger.error("%s: not done after %g s, and left", self._run_dir / CERTIFICATE, FINISHED_SECONDS)
            logger.info("%s took %.1f s beside the run", self._run_dir / CERTIFICATE, self._seconds)

    def last_step(self, planned: int) -> int:
        """The last step to take: a replay may end before the planned one."""
        return planned if self._repeat is None else min(planned, self._repeat.step)

    def prepare(self, hardware: Hardware, checkpoint: Path | None) -> None:
        """What the certificate begins with. A run that continues in its own directory also continues its certificate.

        Raises ConfigError if this replays a run on other hardware.
        """
        expected = self._repeat and self._repeat.hardware
        if expected and expected != hardware:
            raise ConfigError(
                f"the run to repeat computed on {_named(expected)}, this is {_named(hardware)}",
                hint="replay it on the same kind and number of nodes and devices",
            )
        self._certificate = self._certificate.model_copy(update={"hardware": hardware})
        self._jobs.put(partial(self._beginning, checkpoint))

    def begin(self) -> None:
        """Starts to write. Before it, the certificate of the run's earlier part is not changed."""
        self._thread.start()

    def checkpoint(self, step: int, path: Path) -> None:
        """Adds a complete checkpoint. Returns at once."""
        self._jobs.put(lambda: {"checkpoints": {**self._certificate.checkpoints, step: self._checkpoint(path)}})

    def lowered(self, step: int, limit: LoweredLimit) -> None:
        """Adds a limit that was lowered in a step. Returns at once."""
        self._jobs.put(partial(self._lowered, step, str(limit)))

    def model(self, step: int, path: Path) -> None:
        """Adds the exported model, which gets a certificate of its own. Returns at once."""
        self._jobs.put(partial(self._model, step, path))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            started = time.perf_counter()
            try:
                self._certificate = self._certificate.model_copy(update=job())
                write_certificate(self._run_dir, self._certificate)
            except (OSError, CheckpointError) as error:  # a full disk, or a checkpoint removed by keep_checkpoints
                logger.warning("%s is incomplete: %s", self._run_dir / CERTIFICATE, error)
            self._seconds += time.perf_counter() - started

    def _beginning(self, checkpoint: Path | None) -> dict[str, Any]:
        """The inputs, and what is known of the run before `checkpoint`. An unreadable checkpoint is left out."""
        if checkpoint is None:
            return {"inputs": self._inputs()}
        earlier = self._earlier()
        if earlier is None:
            unknown = Weights(path=self._relative(checkpoint), content={})  # a replay refuses it
            return {"origin": self._hashed(checkpoint) or unknown, "inputs": self._inputs()}
        step = checkpoint_step(checkpoint)
        kept = {number: weights for number, weights in earlier.checkpoints.items() if number <= step}
        if step not in kept and checkpoint.is_relative_to(self._run_dir):  # the run ended before it was hashed
            resumed = self._hashed(checkpoint)
            kept |= {step: resumed} if resumed else {}
        inputs = self._inputs()
        current = self._certificate.model_copy(update={"inputs": inputs})
        changes = [f"from step {step + 1} on: {line}" for line in differences(earlier, current)]
        for line in changes:
            logger.warning("the run continues with a change, %s", line)
        return {
            "inputs": inputs,
            "origin": earlier.origin,
            "changes": [*earlier.changes, *changes],
            "lowered": {number: limits for number, limits in earlier.lowered.items() if number <= step},
            "checkpoints": kept,
        }

    def _inputs(self) -> dict[str, Input]:
        """The inputs that exist, by setting."""
        inputs = {setting: self._input(path) for setting, path in self._paths}
        return {setting: hashed for setting, hashed in inputs.items() if hashed is not None}

    def _input(self, path: Path) -> Input | None:
        try:
            return hashed_input(path) if path.exists() else None
        except OSError as error:
            self._warn(path, error)
            return Input(path=str(path), files={}, error=str(error))

    def _hashed(self, checkpoint: Path) -> Weights | None:
        """The hashes of a checkpoint; None, with a warning that names it, if it cannot be read."""
        try:
            return self._checkpoint(checkpoint)
        except (OSError, CheckpointError) as error:
            self._warn(checkpoint, error)
            return None

    def _warn(self, path: Path, error: Exception) -> None:
        logger.warning("%s is incomplete: %s cannot be hashed: %s", self._run_dir / CERTIFICATE, path, error)

    def _lowered(self, step: int, limit: str) -> dict[str, Any]:
        lowered = self._certificate.lowered
        return {"lowered": {**lowered, step: [*lowered.get(step, []), limit]}}

    def _model(self, step: int, path: Path) -> dict[str, Any]:
        content = certify_model(path, self._certificate, step)
        return {"models": {step: Weights(path=self._relative(path), content=content)}}

    def _earlier(self) -> Certificate | None:
        """The certificate of this run's earlier part."""
        try:
            return read_certificate(self._run_dir)
        except CertificateError as error:
            if (self._run_dir / CERTIFICATE).exists():
                logger.warning("%s; it starts anew from the checkpoint", error)
            return None

    def _checkpoint(self, path: Path) -> Weights:
        content = checkpoint_weights(path)
        return Weights(path=self._relative(path), content=content, manifest=sha256(path / STATE_FILE))

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._run_dir) if path.is_relative_to(self._run_dir) else path)


def certify_model(directory: Path, certificate: Certificate, step: int) -> dict[str, str]:
    """Writes a copy of a run's certificate into a model directory, with the SHA-256 of its weights, which it returns.

    Raises CheckpointError or OSError.
    """
    content = model_weights(directory)
    models = {step: Weights(path=".", content=content)}
    write_certificate(directory, certificate.model_copy(update={"models": models}))
    return content


def hardware_of(groups: Sequence[WorkerGroup[TrainingRole]], engines: int) -> Hardware:
    """The devices of a run, asked from each rank."""
    nodes = {worker.spec.slot.node.id for group in groups for worker in group.workers}
    devices = {group.role: group.call(TrainingRole.device_kind) for group in groups}
    return Hardware(nodes=len(nodes), engines=engines, devices=devices)


def _named(hardware: Hardware) -> str:
    roles = "; ".join(f"{role}: {', '.join(devices)}" for role, devices in hardware.devices.items())
    return f"{hardware.nodes} nodes with {hardware.engines} engines ({roles})"
