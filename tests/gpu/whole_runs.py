"""Model, data and settings of the whole runs in this folder."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.trainer.whole_run import Run, Runs

Record = Callable[[str, object], None]

# Large steps, so that an engine that missed an update is far from the actor.
FAST = ("actor.learning_rate=3e-3", "critic.learning_rate=1e-2")
COMMON = (
    "model.dtype=bfloat16",
    "data.max_response_length=32",
    "rollout.max_num_seqs=32",  # so that vLLM captures few CUDA graphs
    "actor.micro_batch_tokens=1024",
    "critic.micro_batch_tokens=1024",
    "trainer.total_steps=3",
    "trainer.test_freq=-1",
    "trainer.save_freq=0",
    "trainer.worker_timeout=150",
)
SHOWN = (
    "rollout/log_prob_difference_mean",
    "rollout/log_prob_difference",
    "rollout/ratio_outside_tenth",
    "reference/kl",
    "actor/entropy",
    "actor/gradient_norm",
    "critic/gradient_norm",
    "actor/gpu_peak_gib",
    "rollout/response_length",
    "rollout/synced_bytes",
    "rollout/corrected_fraction",
    "time/start_up",
    "time/sync_weights",
    "time/step",
)


@dataclass(frozen=True)
class Machine:
    """The machine of the runs. `first` and `second` are its devices as `device_mapping` names them."""

    runs: Runs
    device: str
    first: str
    second: str

    @property
    def transport_within_a_device(self) -> str:
        """The transport of weights to engines on the actor's device."""
        return "CUDA IPC" if self.device == "cuda" else "Ray's object store"

    def transport_between_devices(self, transfer: str) -> str:
        """The transport to another device; `transfer` is `rollout.weight_transfer`."""
        if self.device == "cuda":
            return "NCCL"
        return "gloo" if transfer == "broadcast" else "Ray's object store"

    def on(self, count: int) -> list[str]:
        """The settings for a run on `count` devices."""
        return [f"trainer.n_gpus_per_node={count}"] if self.device == "cuda" else [f"trainer.nnodes={count}"]


def write_job(directory: Path) -> tuple[Path, list[Path]]:
    """A small model and prompts."""
    from trainer.data.arithmetic import write_arithmetic

    train, _, validation = write_arithmetic(directory / "data", 64, 8, max_number=9, dropped_carries=0.75, seed=0)
    return write_model(directory / "model", width=256), [train, validation]


def write_model(directory: Path, width: int) -> Path:
    """A small model with 4 heads and clearly different log-probs; `width` is that of its hidden states."""
    import torch

    from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model

    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    shape = ModelShape(hidden_size=width, intermediate_size=2 * width, attention_heads=4, key_value_heads=2)
    model = create_model(tokenizer, shape, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a new model is almost uniform, so wrong weights would hardly show
        for weight in model.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    save_model(model, tokenizer, directory)
    return directory


def shown(row: dict[str, float]) -> str:
    """The main metrics of a step, in one line."""
    return json.dumps({name: round(row[name], 5) for name in SHOWN if name in row})


@dataclass(frozen=True)
class Finished:
    """A successful run: its output, the metrics of each step, and its directory."""

    said: str
    steps: list[dict[str, float]]
    directory: Path

    @classmethod
    def of(cls, run: Run) -> "Finished":
        try:
            said = run.succeed()
        finally:  # a run that hangs must free the GPUs for the next
            run.process.kill()
        return cls(said, [row for row in run.metrics() if row["step"] > 0], run.directory)

    def note(self, record: Record) -> None:
        for row in self.steps:
            record(f"step {row['step']:g}", shown(row))
