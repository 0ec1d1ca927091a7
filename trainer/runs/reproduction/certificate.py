"""`certificate.json`: everything that a run's weights depend on, and the SHA-256 of these weights."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.errors import CertificateError
from trainer.records.files.atomic import atomic_file
from trainer.records.files.sealed import read_sealed, sealed

CERTIFICATE = "certificate.json"
# Settings of `trainer` that decide what is recorded, where and when, but not which weights are learned.
RECORDING = {
    *("output_dir", "run_id", "resume", "spare_dir", "save_freq", "save_minutes", "keep_checkpoints"),
    *("loggers", "project_name", "profiler", "trajectories", "worker_timeout", "stall_seconds", "on_stall"),
}


_PathText = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Image(_Part):
    """The container image, by its manifest /etc/slipway/image.json."""

    target: str
    variant: str
    version: str
    lock: str
    manifest: str
    """SHA-256 of the manifest."""


class Software(_Part):
    """The program that ran. `image` is None outside an image of `buildkit`; `code` is the SHA-256 of this package."""

    image: Image | None
    version: str
    commit: str | None
    code: str
    python: str
    packages: dict[str, str]


class Hardware(_Part):
    """The kind of machine: nodes, rollout engines, and the device of every rank by role."""

    nodes: int
    engines: int
    devices: dict[str, list[str]]


class Input(_Part):
    """A file or directory that a setting names, with the SHA-256 of each file; `error` is why it has none."""

    path: _PathText
    files: dict[str, str]
    error: str = ""


class Weights(_Part):
    """Where weights lie, relative to the run's directory if they are in it, and the SHA-256 of their content by role.

    `manifest` is the SHA-256 of a checkpoint's state.json, which lists the SHA-256 of each of its files.
    """

    path: _PathText
    content: dict[str, str]
    manifest: str = ""


class Certificate(_Part):
    """One run. `given` are the settings that differ from defaults, `settings` all of them.

    `origin` is the checkpoint of another run that it started from. `changes` names what differed from the run's earlier
    part when it was resumed. `lowered` are the limits that were lowered because a GPU's memory was full; these,
    `checkpoints` and `models` are by step.
    """

    format: Literal[2] = 2
    command: str
    run: str
    seed: int
    software: Software
    hardware: Hardware | None = None
    inputs: dict[str, Input] = {}
    origin: Weights | None = None
    changes: list[str] = []
    lowered: dict[int, list[str]] = {}
    checkpoints: dict[int, Weights] = {}
    models: dict[int, Weights] = {}
    given: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]

    def weights(self, step: int) -> dict[str, str]:
        """The SHA-256 of the weights after a step, by role; those of the final model are `model`."""
        content = dict(self.checkpoints[step].content) if step in self.checkpoints else {}
        return content | (self.models[step].content if step in self.models else {})

    @property
    def steps(self) -> list[int]:
        """The steps whose weights it knows."""
        return sorted({*self.checkpoints, *self.models})


def read_certificate(run_dir: Path) -> Certificate:
    """The certificate of a run. Raises CertificateError if it is missing or damaged."""
    file = run_dir / CERTIFICATE
    try:
        certificate = read_sealed(Certificate, file)
    except FileNotFoundError as error:
        raise CertificateError(
            f"{run_dir}: no {CERTIFICATE} there",
            hint="name the directory of a run, like runs/20260101T120000Z; the file appears in its first minutes",
        ) from error
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{file}: damaged: {error}", hint="restore it from a copy, or use the version that wrote it"
        ) from error
    return certificate


def write_certificate(run_dir: Path, certificate: Certificate) -> None:
    """Replaces the certificate of a run. Raises OSError."""
    with atomic_file(run_dir / CERTIFICATE) as temporary:
        temporary.write_text(sealed(certificate), encoding="utf-8")


def differences(first: Certificate, second: Certificate) -> list[str]:
    """Each thing that decides the weights and differs: software, hardware (if both name it), inputs and settings.

    Settings that are paths count by the content of their files.
    """
    lines = [*_software(first.software, second.software)]
    if first.hardware is not None and second.hardware is not None:
        lines += tree_differences("hardware", first.hardware.model_dump(), second.hardware.model_dump())
    lines += input_differences(first.inputs, second.inputs)
    return [*lines, *tree_differences("", _deciding(first.settings), _deciding(second.settings))]


def input_differences(first: Mapping[str, Input], second: Mapping[str, Input]) -> list[str]:
    """Each input file that differs, and each input that one of both could not hash."""
    lines = []
    for setting in sorted({*first, *second}):
        unknown = next(
            (inputs[setting] for inputs in (first, second) if setting in inputs and inputs[setting].error), None
        )
        if unknown is not None:
            lines.append(f"{setting}: {unknown.path} could not be hashed for the certificate: {unknown.error}")
            continue
        ours, theirs = (inputs[setting].files if setting in inputs else {} for inputs in (first, second))
        path = Path((first.get(setting) or second[setting]).path)
        for name in sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
            change = "is missing" if name not in theirs else "is new" if name not in ours else "changed (SHA-256)"
            lines.append(f"{setting}: {path if name == path.name else path / name} {change}")
    return lines


def tree_differences(prefix: str, first: object, second: object) -> list[str]:
    """The leaves of two trees of JSON that differ, each named by its path."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return [
            line
            for name in sorted({*first, *second})
            for line in tree_differences(f"{prefix}.{name}" if prefix else name, first.get(name), second.get(name))
        ]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for at, pair in pairs for line in tree_differences(f"{prefix}.{at}", *pair)]
    return [] if first == second else [f"{prefix}: {first} / {second}"]


def _software(first: Software, second: Software) -> Iterator[str]:
    if first.image != second.image:
        yield f"image: {_image(first.image)} / {_image(second.image)}"
    if first.code != second.code:
        yield f"trainer: version {first.version}, {first.code[:12]} / version {second.version}, {second.code[:12]}"
    yield from tree_differences("packages", first.packages, second.packages)
    yield from tree_differences("python", first.python, second.python)


def _image(image: Image | None) -> str:
    if image is None:
        return "no image"
    return f"{image.target} {image.variant}, lock {image.lock}, manifest {image.manifest[:12]}"


def _deciding(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    trainer = {name: value for name, value in settings.get("trainer", {}).items() if name not in RECORDING}
    return {section: _without_paths(values) for section, values in {**settings, "trainer": trainer}.items()}


def _without_paths(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return "PATH" if isinstance(value, str) and value.startswith("/") else value
