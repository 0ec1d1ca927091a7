"""Learning-rate schedules, compared with those of Transformers at every update."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import optimization

from trainer.config.sections.optimization import OptimizerConfig, ScheduleConfig

TOTAL = 37


def transformers_factors(schedule: Callable[..., Any], **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, **arguments)
    factors = []
    for _ in range(TOTAL):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


SAME: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "get_constant_schedule", {}),
    ({"warmup_steps": 10}, "get_constant_schedule_with_warmup", {"num_warmup_steps": 10}),
    ({"warmup_ratio": 0.1}, "get_constant_schedule_with_warmup", {"num_warmup_steps": 3}),
    ({"warmup_steps": 50}, "get_constant_schedule_with_warmup", {"num_warmup_steps": 50}),
    ({"name": "linear", "warmup_steps": 5}, "get_linear_schedule_with_warmup", {"num_warmup_steps": 5}),
    ({"name": "cosine", "warmup_steps": 5}, "get_cosine_schedule_with_warmup", {"num_warmup_steps": 5}),
    ({"name": "cosine", "cycles": 1.5}, "get_cosine_schedule_with_warmup", {"num_warmup_steps": 0, "num_cycles": 1.5}),
    (
        {"name": "cosine", "warmup_ratio": 0.2, "min_ratio": 0.1},
        "get_cosine_with_min_lr_schedule_with_warmup",
        {"num_warmup_steps": 7, "min_lr_rate": 0.1},
    ),
    ({"name": "inverse_sqrt", "warmup_steps": 6}, "get_inverse_sqrt_schedule", {"num_warmup_steps": 6}),
    (
        {"name": "wsd", "stable_ratio": 0.75, "min_ratio": 0.2},
        "get_wsd_schedule",
        {"num_warmup_steps": 0, "num_stable_steps": 27, "num_decay_steps": 10, "min_lr_ratio": 0.2},
    ),
    # 32 updates after the warm-up, of which 16 are stable.
    *(
        (
            {"name": "wsd", "warmup_steps": 5, "stable_ratio": 0.5, "decay": decay},
            "get_wsd_schedule",
            {"num_warmup_steps": 5, "num_stable_steps": 16, "num_decay_steps": 16, "decay_type": decay},
        )
        for decay in ("linear", "1-sqrt")
    ),
]
HAVE_NO_TOTAL = ("get_constant_schedule", "get_constant_schedule_with_warmup", "get_inverse_sqrt_schedule")


@pytest.mark.parametrize(("ours", "theirs", "arguments"), SAME)
def test_the_factor_is_transformers_at_every_update(
    ours: dict[str, Any], theirs: str, arguments: dict[str, Any]
) -> None:
    total = {} if theirs in (*HAVE_NO_TOTAL, "get_wsd_schedule") else {"num_training_steps": TOTAL}
    expected = transformers_factors(getattr(optimization, theirs), **arguments, **total)
    schedule = ScheduleConfig(**ours)
    assert [schedule.factor(update, TOTAL) for update in range(TOTAL)] == pytest.approx(expected, abs=1e-12)


def test_a_schedule_of_its_own_length_ignores_the_run_s_and_stays_at_its_end() -> None:
    schedule = ScheduleConfig(name="cosine", total_steps=4, min_ratio=0.25)
    factors = [schedule.factor(update, run_steps=1000) for update in range(7)]
    assert factors == pytest.approx([1, 0.890165, 0.625, 0.359835, 0.25, 0.25, 0.25], abs=1e-6)


def test_updates_may_count_from_one() -> None:
    schedule = ScheduleConfig(warmup_steps=4, zero_indexed=False)
    assert [schedule.factor(update, 10) for update in range(5)] == [0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (ScheduleConfig, {"min_ratio": 0.1}, "min_ratio=0.1 has no effect with name=constant; it is read by cosine"),
        (ScheduleConfig, {"name": "linear", "cycles": 2}, "cycles=2.0 has no effect with name=linear"),
        (ScheduleConfig, {"warmup_steps": 3, "warmup_ratio": 0.1}, "contradict each other"),
        (OptimizerConfig, {"momentum": 0.9}, "momentum=0.9 has no effect with name=adamw; it is read by sgd, rmsprop"),
        (OptimizerConfig, {"name": "sgd", "nesterov": True}, "nesterov=true needs a momentum"),
        (OptimizerConfig, {"betas": (0.9, 1.0)}, "each is at least 0 and below 1"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(section: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        section(**values)
