"""Tries an image on this machine, part by part, and writes down what it showed."""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from buildkit.certification import trials
from buildkit.certification.certificate import NOT_DONE, Certificate, Hardware, Part
from buildkit.certification.judge import COLLECTIVES, DEVICES, TRAINING
from buildkit.certification.trials import SHORTEST, SMOKE, ContainerTrial, Trial
from buildkit.errors import UsageError
from buildkit.host.machine import Machine, read_machine
from buildkit.recipe.dockerfile import CHANGES
from buildkit.recipe.lock_file import find_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.engine import ContainerEngine
from buildkit.running.short_run import count_gpus, labels_of

log = logging.getLogger(__name__)


def certify_image(
    matrix: Matrix, variant: Variant, image: str, engine: ContainerEngine, pytest_arguments: tuple[str, ...] = ()
) -> Certificate:
    """The certificate of an image on this machine; a part that fails does not stop the later ones.

    Raises `UsageError` if there is no such image or it is another variant's, `RunError` without a GPU for its target.
    """
    started, machine = time.monotonic(), read_machine()
    labels = labels_of(engine, image, variant)
    if "dev.slipway.extension" in labels:
        raise UsageError(
            f"{image} is extended, and a certificate is about a variant of the project",
            f"name the image without additions: --image slipway:{variant.stock.identifier}",
        )
    facts = engine.inspect(image) or {}
    if labels["dev.slipway.lock"] != f"sha256:{find_lock(matrix, variant).digest}":
        log.warning("certify: the lock has changed since %s was built; `targets` will say so", image)
    if changes := labels.get(CHANGES):
        log.warning("certify: the base of %s is not the one of its lock: %s", image, changes)
    gpus = count_gpus(machine, variant, "certify")
    with tempfile.TemporaryDirectory(prefix="slipway-certify-") as folder:
        trial = ContainerTrial(Path(folder), gpus, image, variant.target, engine, machine)

        def smoke() -> list[Part]:
            return trials.smoke(matrix.root, variant.target, image, pytest_arguments, trial.seconds_left)

        parts = try_parts(  # first what an engine that cannot reach the GPUs refuses at once
            trial,
            ("devices and collectives", (DEVICES, COLLECTIVES), lambda: trials.devices(trial)),
            ("smoke tests", (SMOKE,), smoke),
            (f"PPO with {trial.ranks} ranks", TRAINING, lambda: trials.training(trial)),
        )
        hardware = describe_hardware(machine, variant, trials.device_names(trial))
    return Certificate(
        image=image,
        digests=digests(facts["Id"], facts.get("RepoDigests") or ()),
        target=variant.target,
        variant=variant.name,
        lock=labels["dev.slipway.lock"],
        revision=labels.get("org.opencontainers.image.revision", ""),
        version=labels.get("org.opencontainers.image.version", ""),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=round(time.monotonic() - started, 1),
        rehearsal=not gpus,
        hardware=hardware,
        parts=parts,
    )


def try_parts(trial: Trial, *steps: tuple[str, Sequence[str], Callable[[], list[Part]]]) -> tuple[Part, ...]:
    """The parts of each step: its title, the names of its parts, and the function that tries them.

    A step is not done if too little of the trial's time is left for it.
    """
    parts: list[Part] = []
    for number, (title, names, step) in enumerate(steps, start=1):
        log.info("certify %d/%d: %s", number, len(steps), title)
        late = trial.seconds_left < SHORTEST
        results = [Part(name, NOT_DONE, "the time for all parts was over") for name in names] if late else step()
        for part in results:
            log.info("certify: %s: %s%s", part.name, part.result, f", {part.reason}" if part.reason else "")
        parts += results
    return tuple(parts)


def describe_hardware(machine: Machine, variant: Variant, names: list[str]) -> Hardware:
    """This machine, with the GPUs that the image found in it."""
    gpus = machine.gpus[variant.target]
    return Hardware(
        device=" and ".join(dict.fromkeys(name for name in names if name)) or "CPU",
        count=max(len(names), 1),
        driver=gpus.driver or "",
        cpus=machine.cpus,
        memory_gib=round(machine.ram_bytes / 2**30),
    )


def digests(image_id: str, references: tuple[str, ...]) -> tuple[str, ...]:
    """The digests of a local image: its own, and those of its manifest in the registries that it came from."""
    return tuple(dict.fromkeys((image_id, *(reference.rpartition("@")[2] for reference in references))))
