"""Direct preference optimisation (DPO): learns from pairs of responses, without sampling or rewards.

A step is a step of policy optimisation whose advantages say how strongly each response is to be preferred; see
`trainer.algorithms.preferences.dpo`. Actor and reference are those of every other run.
"""

from collections.abc import Sequence
from pathlib import Path

from trainer.algorithms.preferences.dpo import preference_advantages, preference_pairs
from trainer.config.dpo import DpoConfig, DpoSettings
from trainer.data.batches.batch import Batch
from trainer.data.completions import Completion
from trainer.data.preferences import PreferencePair, read_pairs
from trainer.records.console import Column
from trainer.runs.offline.run import Comparison, train_offline
from trainer.runs.reproduction.writer import Repeat
from trainer.runs.session import Session

COLUMNS = (
    Column("dpo/loss", "loss", ".4f"),
    Column("dpo/margin", "margin", ".3f"),
    Column("dpo/accuracy", "accuracy", ".1%"),
    Column("validation/preference_accuracy", "held-out accuracy", ".1%"),
    Column("time/step", "seconds", ".1f"),
)


def train_on_preferences(settings: DpoConfig, repeat: Repeat | None = None) -> Path:
    """Runs DPO on the Ray cluster at RAY_ADDRESS or on this machine; the run's directory. Raises TrainerError."""

    def method(session: Session) -> Preferences:
        return Preferences(settings.dpo, Comparison(session))

    return train_offline(settings, COLUMNS, read_pairs, method, repeat)


class Preferences:
    """Learns which response of each pair to prefer."""

    def __init__(self, settings: DpoSettings, policies: Comparison) -> None:
        self._settings, self._policies = settings, policies

    def learn(self, examples: Sequence[PreferencePair]) -> tuple[Batch, dict[str, float]]:
        batch = self._policies.compare(completions_of(examples))
        pairs = preference_pairs(batch.old_log_probs, batch.reference_log_probs, batch.response_mask)
        advantages, losses = preference_advantages(pairs, batch.response_mask, self._settings.losses)
        return batch.with_(advantages=advantages), {
            "dpo/loss": losses.mean().item(),
            "dpo/margin": self._settings.beta * pairs.margins.mean().item(),
            "dpo/accuracy": (pairs.margins > 0).float().mean().item(),
        }

    def measure(self, examples: Sequence[PreferencePair]) -> dict[str, float]:
        """The share of held-out pairs in which the policy prefers the chosen response more than the reference does.

        It is 0 while the policy equals the reference.
        """
        batch = self._policies.compare(completions_of(examples))
        pairs = preference_pairs(batch.old_log_probs, batch.reference_log_probs, batch.response_mask)
        return {
            "validation/preference_accuracy": (pairs.margins > 0).float().mean().item(),
            "validation/preference_loss": self._settings.losses(pairs).mean().item(),
        }


def completions_of(pairs: Sequence[PreferencePair]) -> list[Completion]:
    """Numbers 2i and 2i + 1 are the chosen and the rejected response of pair i."""
    return [completion for pair in pairs for completion in pair.completions]
