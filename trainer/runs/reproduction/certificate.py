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
        found = read_sealed(Certificate, file)
    except FileNotFoundError as error:
        raise CertificateError(
            f"{run_dir}: no {CERTIFICATE} there",
            hint="name the directory of a run, like runs/20260101T120000Z; the file appears in its first minutes",
        ) from error
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{file}: damaged: {error}", hint="restore it from a copy, or use the version that wrote it"
        ) from error
    return found


def write_certificate(run_dir: Path, certificate: Certificate) -> None:
    """Replaces the certificate of a run. Raises OSError."""
    with atomic_file(run_dir / CERTIFICATE) as temporary:
        temporary.write_text(sealed(certificate), encoding="utf-8")


def differences(one: Certificate, other: Certificate) -> list[str]:
    """Each thing that decides the weights and differs: software, hardware (if both name it), inputs and settings.

    Settings that are paths count by the content of their files.
    """
    found = [*_software(one.software, other.software)]
    if one.hardware is not None and other.hardware is not None:
        found += tree_differences("hardware", one.hardware.model_dump(), other.hardware.model_dump())
    found += input_differences(one.inputs, other.inputs)
    return [*found, *tree_differences("", _deciding(one.settings), _deciding(other.settings))]


def input_differences(one: Mapping[str, Input], other: Mapping[str, Input]) -> list[str]:
    """Each input file that differs, and each input that one of both could not hash."""
    found = []
    for setting in sorted({*one, *other}):
        unknown = next((own[setting] for own in (one, other) if setting in own and own[setting].error), None)
        if unknown is not None:
            found.append(f"{setting}: {unknown.path} could not be hashed for the certificate: {unknown.error}")
            continue
        ours, theirs = (inputs[setting].files if setting in inputs else {} for inputs in (one, other))
        path = Path((one.get(setting) or other[setting]).path)
        for name in sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
            what = "is missing" if name not in theirs else "is new" if name not in ours else "changed (SHA-256)"
            found.append(f"{setting}: {path if name == path.name else path / name} {what}")
    return found


def tree_differences(prefix: str, one: object, other: object) -> list[str]:
    """The leaves of two trees of JSON that differ, each named by its path."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return [
            line
            for name in sorted({*one, *other})
            for line in tree_differences(f"{prefix}.{name}" if prefix else name, one.get(name), other.get(name))
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for at, pair in pairs for line in tree_differences(f"{prefix}.{at}", *pair)]
    return [] if one == other else [f"{prefix}: {one} / {other}"]


def _software(one: Software, other: Software) -> Iterator[str]:
    if one.image != other.image:
        yield f"image: {_image(one.image)} / {_image(other.image)}"
    if one.code != other.code:
        yield f"trainer: version {one.version}, {one.code[:12]} / version {other.version}, {other.code[:12]}"
    yield from tree_differences("packages", one.packages, other.packages)
    yield from tree_differences("python", one.python, other.python)


def _image(image: Image | None) -> str:
    if image is None:
        return "no image"
    return f"{image.target} {image.variant}, lock {image.lock}, manifest {image.manifest[:12]}"


def _deciding(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    trainer = {name: value for name, value in settings.get("trainer", {}).items() if name not in RECORDING}
    return {section: _without_paths(own) for section, own in {**settings, "trainer": trainer}.items()}


def _without_paths(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _without_paths(own) for name, own in value.items()}
    if isinstance(value, list):
        return [_without_paths(own) for own in value]
    return "PATH" if isinstance(value, str) and value.startswith("/") else value
