"""verl's keys of on-policy distillation."""

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

LOSS, TEACHER = "distillation.distillation_loss", "distillation.teacher_models.teacher_model"
ON = ("distillation.enabled=True", f"{TEACHER}.model_path=/models/teacher")


def test_the_defaults_are_verls() -> None:
    settings = load_config(["verl"], [*ON])[0].distillation
    assert str(settings.teacher) == "/models/teacher"
    assert (settings.estimator, settings.signal, settings.limit) == ("k3", "loss", None)
    assert (settings.rewards, settings.coefficient) == (True, 1.0)


def test_a_teacher_alone_leaves_out_the_other_terms() -> None:
    actor = "actor_rollout_ref.actor"
    line = [f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True", f"{LOSS}.use_task_rewards=False"]
    config, _ = load_config(
        ["verl"],
        [*ON, *line, f"{LOSS}.loss_max_clamp=10.0", f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_coef=0.1"],
    )
    settings = config.distillation
    assert (settings.estimator, settings.signal, settings.limit) == ("k1", "advantage", 10.0)
    assert not settings.rewards
    assert (config.actor.kl_loss_coefficient, config.actor.entropy_coefficient) == (0, 0)


def test_without_distillation_nothing_is_set() -> None:
    line = ["distillation.enabled=False", f"{TEACHER}.model_path=/models/teacher"]
    assert load_config(["verl"], line)[0].distillation.teacher is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([*ON, f"{LOSS}.loss_mode=forward_kl_topk"], "loss_mode=forward_kl_topk is not supported here"),
        ([*ON, f"{LOSS}.loss_mode=k1"], "does not depend on the teacher"),
        ([ON[0]], "needs one teacher"),
    ],
)
def test_what_no_teacher_can_do_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(["verl"], line)
