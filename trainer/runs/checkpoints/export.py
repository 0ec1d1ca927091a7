"""Exports the policy of a checkpoint, without Ray and beside a run that goes on."""

from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.roles import ActorConfig
from trainer.errors import CheckpointError
from trainer.models.backend import training_backend
from trainer.models.export import write_language_model
from trainer.models.files import read_json
from trainer.models.lora import peft_name, write_adapter
from trainer.models.megatron_weights import to_transformers
from trainer.models.model_class import check_exported
from trainer.models.pretrained import load_language_model, read_config
from trainer.records.files.atomic import atomic_directory
from trainer.records.files.disk import writing
from trainer.records.pages.model_card import write_model_card
from trainer.runs.checkpoints.checkpoint import checkpoint_directory, checkpoint_model, last_checkpoint, read_checkpoint
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.reproduction.certificate import CERTIFICATE, read_certificate
from trainer.runs.reproduction.writer import certify_model
from trainer.training.ranks.reading import stored_tensors

_LANGUAGE_MODEL = "network.language_model."
_ADAPTER = (".lora_A", ".lora_B")


def export_checkpoint(run_dir: Path, step: int | None, output: Path | None, model: Path | None) -> Path:
    """Writes the policy of a step's checkpoint, the last one if `step` is None; the directory written.

    `output` defaults to `RUN/models/step_000010`. `model` replaces the directory of the run's starting model. Raises
    CheckpointError or DataError, and CertificateError if the run's certificate is damaged.
    """
    checkpoint = last_checkpoint(run_dir) if step is None else checkpoint_directory(run_dir, step)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir}: no checkpoint yet", hint="set trainer.save_freq in the run, or wait for one")
    base = model or checkpoint_model(checkpoint)
    state = read_checkpoint(checkpoint, ["actor"], base)
    check_exported(base, read_json(base / "config.json"), "model")
    directory = output or run_dir / "models" / checkpoint.name
    with writing(directory), atomic_directory(directory) as partial:
        try:
            _write(checkpoint / "actor", state, base, partial)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{checkpoint}: removed while it was read: {error}",
                hint="export a later step, or raise trainer.keep_checkpoints",
            ) from error
        write_model_card(partial, run_dir, state.step, base, state.config)
        if (run_dir / CERTIFICATE).is_file():  # runs of earlier versions have none
            certify_model(partial, read_certificate(run_dir), state.step)
    return directory


def _write(checkpoint: Path, state: TrainingState, base: Path, directory: Path) -> None:
    try:
        actor, model = (kind.model_validate(state.config.get(name, {})) for kind, name in _SECTIONS)
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint.parent}: its settings are those of another version: {error}",
            hint="export it with the version that wrote it",
        ) from error
    assert isinstance(actor, ActorConfig)
    assert isinstance(model, ModelConfig)
    dtype = getattr(torch, model.dtype_on("cuda" if torch.cuda.is_available() else "cpu"))
    if not actor.lora.rank:
        origins = training_backend(actor.backend).origins(read_config(base), actor.sharding.tensor_parallel)
        trained = (item for name, weight in _weights(checkpoint) for item in to_transformers(name, weight, origins))
        write_language_model(base, trained, dtype, directory)
        return
    adapters = dict(_weights(checkpoint))
    scaling = actor.lora.alpha / actor.lora.rank
    weights = dict(load_language_model(base, dtype).state_dict())
    for name in [name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")]:
        product = adapters[f"{name}.lora_B"] @ adapters[f"{name}.lora_A"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + scaling * product
    write_language_model(base, weights.items(), dtype, directory)
    named = ((peft_name(*name.rsplit(".", 1)), weight) for name, weight in adapters.items() if name.endswith(_ADAPTER))
    write_adapter(named, actor.lora, base, directory / "adapter")


_SECTIONS = ((ActorConfig, "actor"), (ModelConfig, "model"))


def _weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """The trained weights of the language model, whole and on CPU. Raises CheckpointError."""
    return (item for group in stored_tensors(checkpoint, _LANGUAGE_MODEL) for item in group.items())
