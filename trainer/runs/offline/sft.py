"""Supervised fine-tuning (SFT): learns to write the responses in files.

A step is a step of policy optimisation on every learned token with advantage 1, whose loss is the cross entropy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.sections.data import DataConfig
from trainer.config.sft import SftConfig
from trainer.data.batches.batch import Batch
from trainer.data.completions import Completion
from trainer.data.demonstrations import read_demonstrations
from trainer.data.subset import Subset
from trainer.records.console import Column
from trainer.runs.interfaces import ActorRole
from trainer.runs.offline.run import completion_batch, train_offline
from trainer.runs.passes import forward
from trainer.runs.reproduction.writer import Repeat
from trainer.runs.session import Session

COLUMNS = (
    Column("sft/loss", "loss", ".4f"),
    Column("validation/sft_loss", "held-out loss", ".4f"),
    Column("time/step", "seconds", ".1f"),
)


def fine_tune(settings: SftConfig, repeat: Repeat | None = None) -> Path:
    """Fine-tunes on the Ray cluster at RAY_ADDRESS or on this machine; the run's directory. Raises TrainerError."""

    def read(files: Sequence[Path], tokenizer: Any, data: DataConfig, subset: Subset) -> list[Completion]:
        return read_demonstrations(files, tokenizer, data, settings.sft, subset)

    also = {"sft/loss": "actor/policy_loss"}
    return train_offline(settings, COLUMNS, read, Demonstrations, repeat, validates=False, also=also)


class Demonstrations:
    """Learns to write every learned token."""

    def __init__(self, session: Session) -> None:
        self._actor = session.workers.training.actor

    def learn(self, examples: Sequence[Completion]) -> tuple[Batch, dict[str, float]]:
        batch = completion_batch(examples)
        return batch.with_(advantages=batch.response_mask.float()), {}

    def measure(self, examples: Sequence[Completion]) -> dict[str, float]:
        """The mean loss over the learned tokens of held-out rows."""
        batch = completion_batch(examples)
        log_probs, mask = forward(self._actor, ActorRole.log_probs, batch), batch.response_mask
        return {"validation/sft_loss": -(log_probs.where(mask, 0.0).sum() / mask.sum()).item()}
