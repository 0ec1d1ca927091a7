"""Compares a run's certificate with what is there now."""

from collections.abc import Iterator
from pathlib import Path

from trainer.errors import CertificateError, CheckpointError, DataError
from trainer.records.files.checksums import sha256
from trainer.records.files.run_files import read_settings
from trainer.runs.checkpoints.checkpoint import check_whole, checkpoints
from trainer.runs.checkpoints.manifest import STATE_FILE
from trainer.runs.reproduction.certificate import (
    Certificate,
    Input,
    Weights,
    input_differences,
    read_certificate,
    tree_differences,
)
from trainer.runs.reproduction.digests import checkpoint_weights, model_weights
from trainer.runs.reproduction.inputs import hashed_again


def verify(run_dir: Path) -> list[str]:
    """Each difference between a run's certificate and its inputs, settings, checkpoints and model, and each input that
    the certificate has no hashes of; empty if none.

    Raises CertificateError if the certificate is missing or damaged.
    """
    certificate = read_certificate(run_dir)
    return [
        *input_differences(certificate.inputs, inputs_now(certificate)),
        *_settings(run_dir, certificate),
        *_checkpoints(run_dir, certificate),
        *_models(run_dir, certificate),
    ]


def inputs_now(certificate: Certificate) -> dict[str, Input]:
    """The inputs of a certificate as they are now, except for those with nothing to compare them with."""
    inputs = {}
    for setting, recorded in certificate.inputs.items():
        try:
            inputs[setting] = recorded if recorded.error else hashed_again(recorded)
        except OSError as error:
            raise DataError(f"{setting}={recorded.path}: cannot be read: {error}", hint="make it readable") from error
    return inputs


def check_weights(run_dir: Path, recorded: Weights) -> Iterator[str]:
    """Each difference between the weights of a certificate and the checkpoint or model that it names."""
    place = run_dir / recorded.path
    try:
        if not place.is_dir():
            yield f"{place} is missing"
            return
        if not recorded.content:
            yield f"{place}: its weights could not be read when they were to be certified"
            return
        if recorded.manifest:
            check_whole(place)
            content = checkpoint_weights(place)
        else:
            content = model_weights(place)
        state = sha256(place / STATE_FILE) if recorded.manifest else ""
    except (OSError, CheckpointError) as error:
        yield str(error)
        return
    for role in sorted({*recorded.content, *content}):
        if recorded.content.get(role) != content.get(role):
            ours, theirs = (str(content.get(role))[:12] for content in (recorded.content, content))
            yield f"{place}: other weights of {role}: SHA-256 {theirs}, certified {ours}"
    if state != recorded.manifest:
        yield f"{place / STATE_FILE} changed (SHA-256)"


def _settings(run_dir: Path, certificate: Certificate) -> list[str]:
    settings = read_settings(run_dir)
    if not settings:
        return [f"{run_dir}: its settings (config.json) are missing"]
    return tree_differences("config.json", certificate.settings, settings)


def _checkpoints(run_dir: Path, certificate: Certificate) -> Iterator[str]:
    pruned = certificate.settings.get("trainer", {}).get("keep_checkpoints") is not None
    last = max(certificate.checkpoints, default=0)
    present = checkpoints(run_dir)
    for step, weights in sorted(certificate.checkpoints.items()):
        if not pruned or step == last or run_dir / weights.path in present:
            yield from check_weights(run_dir, weights)
    known = {run_dir / weights.path for weights in certificate.checkpoints.values()}
    for directory in present:
        if directory not in known:
            yield f"{directory} is not in the certificate"


def _models(run_dir: Path, certificate: Certificate) -> Iterator[str]:
    for weights in certificate.models.values():
        yield from check_weights(run_dir, weights)
    final = run_dir / "model"
    if final.is_dir() and final not in {run_dir / weights.path for weights in certificate.models.values()}:
        yield f"{final} is not in the certificate"
    for directory in sorted(path for path in (run_dir / "models").glob("*") if path.is_dir()):
        try:
            exported = read_certificate(directory)
        except CertificateError as error:
            yield str(error)
            continue
        if exported.run != certificate.run:
            yield f"{directory} is of the run {exported.run}"
        for weights in exported.models.values():
            yield from check_weights(directory, weights)
