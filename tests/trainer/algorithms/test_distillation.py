"""On-policy distillation: the loss from a teacher, alone and beside rewards."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.tensors import normal
from trainer.algorithms.losses.aggregation import GlobalCount
from trainer.cluster.place import RankPlace
from trainer.config.sections.distillation import DistillationConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.roles.actor import ActorWorker

VOCABULARY, ROWS = 6, 256


def actor(**distillation: object) -> ActorWorker:
    settings = {
        "distillation": {"teacher": "/teacher", **distillation},
        "algorithm": {"advantage": "reinforce_plus_plus"},
    }
    return ActorWorker(Config.model_validate(settings), RankPlace(0, 1, "127.0.0.1", "cpu"))


def sampled(token_ids: Tensor, teacher: Tensor, old: Tensor, advantages: Tensor) -> Batch:
    """Responses of one token."""
    rows = len(token_ids)
    return Batch(
        torch.stack([torch.zeros_like(token_ids), token_ids], dim=1),
        torch.ones(rows, dtype=torch.int64),
        torch.ones(rows, 1, dtype=torch.bool),
        old_log_probs=old[token_ids].unsqueeze(1),
        teacher_log_probs=teacher[token_ids].unsqueeze(1),
        advantages=advantages,
    )


def kl(logits: Tensor, teacher: Tensor) -> float:
    log_probs = logits.detach().log_softmax(0)
    return float((log_probs.exp() * (log_probs - teacher)).sum())


@pytest.mark.parametrize(("signal", "estimator"), [("advantage", "k1"), ("loss", "k2"), ("loss", "k3")])
def test_the_student_approaches_the_teacher(signal: str, estimator: str) -> None:
    worker = actor(signal=signal, estimator=estimator)
    teacher = (2 * normal(0, VOCABULARY)).log_softmax(0)
    logits = normal(1, VOCABULARY).requires_grad_()
    optimizer, generator = torch.optim.SGD([logits], lr=0.5), torch.Generator().manual_seed(0)
    before = kl(logits, teacher)
    for _ in range(60):
        old = logits.detach().log_softmax(0)
        token_ids = torch.multinomial(old.exp(), ROWS, replacement=True, generator=generator)
        batch = sampled(token_ids, teacher, old, normal(2, ROWS, 1))
        log_probs = logits.log_softmax(0)[token_ids].unsqueeze(1)
        loss, metrics = worker.loss((log_probs, torch.zeros_like(log_probs)), batch, GlobalCount(ROWS, ROWS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert "teacher_kl" in metrics
    assert kl(logits, teacher) < before / 10


def test_rewards_count_only_where_asked() -> None:
    teacher, old = normal(0, VOCABULARY).log_softmax(0), normal(1, VOCABULARY).log_softmax(0)
    token_ids, advantages = torch.tensor([0, 1, 2, 3]), normal(2, 4, 1)

    def gradient(**distillation: object) -> Tensor:
        batch = sampled(token_ids, teacher, old, advantages)
        log_probs = old[token_ids].unsqueeze(1).requires_grad_()
        loss, _ = actor(**distillation).loss((log_probs, torch.zeros_like(log_probs)), batch, GlobalCount(4, 4))
        return torch.autograd.grad(loss, log_probs)[0]

    from_teacher = (old - teacher)[token_ids].unsqueeze(1) / 4  # at ratio 1, minus the advantage -k1
    assert_close(gradient(), from_teacher)
    assert_close(gradient(coefficient=0.5, rewards=True), 0.5 * from_teacher - advantages / 4)
    limited = (old - teacher)[token_ids].unsqueeze(1).clamp(-0.1, 0.1) / 4
    assert_close(gradient(limit=0.1), limited)


def test_a_loss_without_the_teacher_in_its_gradient_is_refused() -> None:
    with pytest.raises(ValidationError, match="does not depend on the teacher"):
        DistillationConfig.model_validate({"signal": "loss", "estimator": "k1"})
