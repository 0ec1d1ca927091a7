"""Every writer of checkpoints and models on a full disk, for test_full_disk.py: `full_disk_program.py SOURCE DISK`.

Prints a line of JSON for each writer: its name, the class of the error, message and hint.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cluster.place import RankPlace
from trainer.config.sections.roles import LoraConfig
from trainer.config.tree import Config
from trainer.models.export import write_language_model
from trainer.models.lora import write_adapter
from trainer.models.networks import PolicyNetwork
from trainer.models.pretrained import load_language_model
from trainer.models.small import save_model
from trainer.records.files.atomic import atomic_directory
from trainer.roles.actor import ActorWorker
from trainer.runs.checkpoints.checkpoint import CheckpointWriter, hashed_inputs
from trainer.runs.checkpoints.export import export_checkpoint
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.process_group import join, open_store
from trainer.training.ranks.sharded_state import ShardedState
from trainer.training.ranks.sharding import Execution

CPU = torch.device("cpu")


def reported(name: str, write: Callable[[], object]) -> None:
    try:
        outcome: dict[str, Any] = {"error": "", "message": str(write())}
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        outcome = {"error": type(error).__name__, "message": str(error), "hint": getattr(error, "hint", "")}
    sys.stdout.write(json.dumps({"name": name, **outcome}) + "\n")


def engine(source: Path) -> TrainingEngine:
    settings = OptimizerSettings(learning_rate=1e-3, weight_decay=0.0, max_gradient_norm=1.0)
    network = PolicyNetwork(load_language_model(source), 1.0)
    return TrainingEngine(network, Execution(CPU, torch.float32), settings)


def saved(state: ShardedState, directory: Path) -> object:
    directory.mkdir(parents=True)
    state.start_save(directory)
    return state.finish_save(60)


def checkpoint(state: ShardedState, run_dir: Path, source: Path) -> Path:
    """A whole checkpoint of a run."""
    writer = CheckpointWriter(run_dir, None, lambda: hashed_inputs({"model.path": source}))
    state_of_run = {"step": 1, "seed": 0, "sampler": {"epoch": 0, "position": 0, "size": 8, "seed": 0}}
    config = {"model": {"path": str(source)}}
    partial = writer.begin(TrainingState.model_validate({**state_of_run, "config": config}))
    saved(state, partial / "actor")
    return writer.complete({})


def main(source: Path, disk: Path) -> None:
    join(open_store("127.0.0.1", 1, 60), 0, 1, CPU, "127.0.0.1", 60)
    trained = engine(source)
    state = ShardedState(trained)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    weights = model.state_dict()
    run_dir = source.parent / "run"
    checkpoint(state, run_dir, source)

    actor = ActorWorker(Config.model_validate({"model": {"path": source}}), RankPlace(0, 1, "", "cpu"))
    actor.engine = trained

    def final_model() -> None:
        with atomic_directory(disk / "run" / "model") as partial:
            actor.export(partial)

    adapter = {"base_model.model.q_proj.lora_A.weight": torch.zeros(2**20)}
    reported("checkpoint", lambda: saved(state, disk / "checkpoints" / ".step_000001.0123456789ab.partial" / "actor"))
    shutil.rmtree(disk / "checkpoints")
    reported("model", lambda: write_language_model(source, weights.items(), torch.float32, disk / "model"))
    shutil.rmtree(disk / "model")
    reported("final model", final_model)
    reported("export", lambda: export_checkpoint(run_dir, None, disk / "export", None))
    reported("adapter", lambda: write_adapter(adapter.items(), LoraConfig(rank=2), source, disk / "adapter"))
    shutil.rmtree(disk / "adapter")
    reported("warm start", lambda: save_model(model, tokenizer, disk / "warm"))
    reported("left", lambda: json.dumps(sorted(path.name for path in disk.iterdir())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
