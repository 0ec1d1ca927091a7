"""Kahneman-Tversky optimisation (KTO): learns from responses that are labelled desirable or undesirable.

A step is a step of policy optimisation, as in DPO; see `trainer.algorithms.preferences.kto`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainer.algorithms.preferences.dpo import log_ratios
from trainer.algorithms.preferences.kto import estimated_kl, mismatched, unpaired_advantages
from trainer.algorithms.registry import UNPAIRED_LOSSES
from trainer.algorithms.rows import Labelled
from trainer.config.kto import KtoConfig, KtoSettings
from trainer.data.batches.batch import Batch
from trainer.data.preferences import LabelledResponse, read_labelled
from trainer.records.console import Column
from trainer.runs.offline.run import Comparison, train_offline
from trainer.runs.reproduction.writer import Repeat
from trainer.runs.session import Session

COLUMNS = (
    Column("kto/loss", "loss", ".4f"),
    Column("kto/kl", "KL", ".3f"),
    Column("kto/margin", "margin", ".3f"),
    Column("validation/kto_margin", "held-out margin", ".3f"),
    Column("time/step", "seconds", ".1f"),
)


def train_on_labels(settings: KtoConfig, repeat: Repeat | None = None) -> Path:
    """Runs KTO on the Ray cluster at RAY_ADDRESS or on this machine; the run's directory. Raises TrainerError."""

    def method(session: Session) -> Labels:
        return Labels(settings.kto, Comparison(session))

    return train_offline(settings, COLUMNS, read_labelled, method, repeat)


class Labels:
    """Learns which responses are desirable."""

    def __init__(self, settings: KtoSettings, policies: Comparison) -> None:
        self._settings, self._policies = settings, policies

    def learn(self, examples: Sequence[LabelledResponse]) -> tuple[Batch, dict[str, float]]:
        batch, responses = self._compare(examples)
        advantages, losses = unpaired_advantages(responses, batch.response_mask, self._settings.losses)
        return batch.with_(advantages=advantages), {
            "kto/loss": losses.mean().item(),
            "kto/kl": responses.kl,
            **reward_means(responses, self._settings.beta),
        }

    def measure(self, examples: Sequence[LabelledResponse]) -> dict[str, float]:
        _, responses = self._compare(examples)
        return {
            "validation/kto_margin": reward_means(responses, self._settings.beta)["kto/margin"],
            "validation/kto_loss": self._settings.losses(responses).mean().item(),
        }

    def _compare(self, examples: Sequence[LabelledResponse]) -> tuple[Batch, Labelled]:
        """The responses as rows with log-probs, and compared with the reference."""
        completions = [example.completion for example in examples]
        batch = self._policies.compare(completions)
        kl = 0.0
        if UNPAIRED_LOSSES[self._settings.loss].needs_kl:
            pairs = zip(completions, mismatched(completions), strict=True)
            others = self._policies.compare([replace(other, prompt=first.prompt) for first, other in pairs])
            kl = estimated_kl(others.old_log_probs, others.reference_log_probs, others.response_mask)
        ratios = log_ratios(batch.old_log_probs, batch.reference_log_probs, batch.response_mask)
        return batch, Labelled(ratios, torch.tensor([example.desirable for example in examples]), kl)


def reward_means(responses: Labelled, beta: float) -> dict[str, float]:
    """The mean implicit reward, beta times the log-ratio, of each kind of response, and their difference.

    A batch may have one kind only. The other has no mean then, and there is no difference.
    """
    rewards, desirable = beta * responses.ratios, responses.desirable
    means = {}
    if desirable.any():
        means["kto/desirable_reward"] = rewards[desirable].mean().item()
    if not desirable.all():
        means["kto/undesirable_reward"] = rewards[~desirable].mean().item()
    if len(means) == 2:
        means["kto/margin"] = means["kto/desirable_reward"] - means["kto/undesirable_reward"]
    return means
