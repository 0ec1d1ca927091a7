"""Certified runs: weights, checkpoints and inputs are files written by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from tests.sealing import reseal
from tests.training_state import training_state
from trainer.config.sections.data import DataConfig
from trainer.config.sections.model import ModelConfig
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import Config
from trainer.records.files.checksums import sha256
from trainer.runs.checkpoints.checkpoint import CheckpointWriter
from trainer.runs.reproduction.certificate import CERTIFICATE, Certificate, Hardware, Input, read_certificate
from trainer.runs.reproduction.inputs import hashed_input
from trainer.runs.reproduction.writer import CertificateWriter

HARDWARE = Hardware(nodes=1, engines=1, devices={"actor": ["a CPU, 2 threads"]})

WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.ones(2, dtype=torch.bfloat16)}


def write_inputs(directory: Path) -> None:
    (directory / "data.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    (directory / "model" / "tokenizer.json").write_text("{}")
    save_file(WEIGHTS, directory / "model" / "model.safetensors")


def settings(directory: Path, **trainer: Any) -> Config:
    section = TrainerConfig(output_dir=directory, run_id="run", total_steps=4, **trainer)
    data = DataConfig(train_files=[directory / "data.jsonl"], cache_dir=directory / "cache")
    return Config(model=ModelConfig(path=directory / "model"), data=data, trainer=section)


def certify(run: Path, config: Config, steps: tuple[int, ...], checkpoint: Path | None = None) -> Certificate:
    (run / "config.json").write_text(config.model_dump_json())
    with CertificateWriter(run, config, config, config) as writer:
        writer.prepare(HARDWARE, checkpoint)
        writer.begin()
        for step in steps:
            weights = {name: tensor + step for name, tensor in WEIGHTS.items()}
            writer.checkpoint(step, write_checkpoint(run, step, weights))
        (run / "model").mkdir(exist_ok=True)
        save_file(weights, run / "model" / "model.safetensors")
        writer.model(step, run / "model")
    return read_certificate(run)


def write_checkpoint(run: Path, step: int, weights: dict[str, Tensor]) -> Path:
    writer = CheckpointWriter(run)
    partial = writer.begin(training_state(step))
    state = {"network": weights, "optimizer": {"state": torch.zeros(3)}}
    distributed_checkpoint.save(state, checkpoint_id=partial / "actor", no_dist=True)
    files = list((partial / "actor").iterdir())
    return writer.complete({f"actor/{file.name}": sha256(file) for file in files})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two checkpoints and a model, with its inputs beside it."""
    write_inputs(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    certify(run, settings(tmp_path), steps=(1, 2))
    return run


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def edited(run: Path, /, **entries: Any) -> None:
    reseal(run / CERTIFICATE, lambda content: content.update(entries))


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An input that cannot be read when a certificate is written, but later."""
    file = tmp_path / "data.jsonl"

    def read(path: Path) -> Input:
        if path == file:
            raise OSError(5, "Input/output error")
        return hashed_input(path)

    monkeypatch.setattr("trainer.runs.reproduction.writer.hashed_input", read)
    return file
