"""verl's keys for optimizers, learning rates and number types."""

from operator import attrgetter
from typing import Any

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

OPTIM = "actor_rollout_ref.actor.optim"
FSDP = "actor_rollout_ref.actor.fsdp_config"


MEGATRON = ("actor_rollout_ref.actor.strategy=megatron",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([f"{OPTIM}.lr_warmup_steps=10"], {"actor.schedule.warmup_steps": 10, "actor.schedule.name": "constant"}),
        ([f"{OPTIM}.lr_warmup_steps=-1", f"{OPTIM}.lr_warmup_steps_ratio=0.1"], {"actor.schedule.warmup_ratio": 0.1}),
        (
            [f"{OPTIM}.lr_warmup_steps_ratio=0.1", f"{OPTIM}.lr_warmup_steps=5"],
            {"actor.schedule.warmup_ratio": 0, "actor.schedule.warmup_steps": 5},
        ),
        (
            [f"{OPTIM}.min_lr_ratio=0.1", f"{OPTIM}.lr_scheduler_type=cosine", f"{OPTIM}.num_cycles=1"],
            {"actor.schedule.name": "cosine", "actor.schedule.min_ratio": 0.1, "actor.schedule.cycles": 1},
        ),
        ([f"{OPTIM}.warmup_style=cosine"], {"actor.schedule.name": "cosine"}),
        ([f"{OPTIM}.warmup_style=null", f"{OPTIM}.lr_scheduler_type=cosine"], {"actor.schedule.name": "cosine"}),
        ([f"{OPTIM}.betas=[0.9,0.95]", "critic.optim.betas=[0.8,0.9]"], {"actor.optimizer.betas": (0.9, 0.95)}),
        (
            [f"{OPTIM}.optimizer=SGD", f"+{OPTIM}.override_optimizer_config.momentum=0.9", f"{OPTIM}.betas=[0.9,0.9]"],
            {"actor.optimizer.name": "sgd", "actor.optimizer.momentum": 0.9, "actor.optimizer.betas": (0.9, 0.999)},
        ),
        ([f"+{OPTIM}.override_optimizer_config={{eps: 1e-6}}"], {"actor.optimizer.epsilon": 1e-6}),
        ([f"{OPTIM}.clip_grad=0.5"], {"actor.max_gradient_norm": 0.5}),
        (["critic.grad_clip=0.5"], {"critic.max_gradient_norm": 0.5, "actor.max_gradient_norm": 1}),
        (["actor_rollout_ref.actor.shuffle=True"], {"actor.shuffle": True, "critic.shuffle": True}),
        ([f"{FSDP}.model_dtype=bfloat16"], {"actor.weights_dtype": "bfloat16", "critic.weights_dtype": "float32"}),
        (
            [f"+{FSDP}.mixed_precision.param_dtype=bf16", f"+{FSDP}.mixed_precision.reduce_dtype=bf16"],
            {"model.dtype": "bfloat16", "actor.sharding.gradient_dtype": "bfloat16"},
        ),
        (["actor_rollout_ref.rollout.dtype=bfloat16", f"{FSDP}.dtype=bfloat16"], {"model.dtype": "bfloat16"}),
        (
            [*MEGATRON, f"{OPTIM}.lr=1e-5", f"{OPTIM}.min_lr=1e-6", f"{OPTIM}.lr_decay_style=cosine"],
            {"actor.schedule.name": "cosine", "actor.schedule.min_ratio": 0.1},
        ),
        ([*MEGATRON, f"{OPTIM}.optimizer=adam"], {"actor.optimizer.name": "adamw"}),
        (
            [*MEGATRON, f"+{OPTIM}.override_optimizer_config.optimizer_cpu_offload=True"],
            {"actor.sharding.optimizer_offload": True},
        ),
    ],
)
def test_an_optimizer_s_key_sets_ours(line: list[str], expected: dict[str, Any]) -> None:
    config, _ = load_config(["verl"], line)
    for key, value in expected.items():
        wanted = pytest.approx(value) if isinstance(value, float) else value
        assert attrgetter(key)(config) == wanted


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([f"{OPTIM}.optimizer=AdamW8bit"], "optimizer=AdamW8bit is not supported"),
        ([f"{OPTIM}.optimizer_impl=torchao.optim"], "optimizer_impl=torchao.optim is not supported"),
        ([f"{OPTIM}.lr_scheduler_type=wsd"], "lr_scheduler_type=wsd is not supported"),
        ([f"{OPTIM}.clip_grad=0.5", "actor_rollout_ref.actor.grad_clip=1.0"], "contradicts"),
        ([f"+{OPTIM}.override_optimizer_config.bf16_stochastic_round=True"], "there is no such setting"),
        ([f"+{OPTIM}.override_optimizer_config.optimizer_cpu_offload=True"], "no such argument"),
        ([f"+{OPTIM}.override_optimizer_config.momentum=0.9"], "momentum=0.9 has no effect with name=adamw"),
        ([f"{FSDP}.model_dtype=fp16"], "model_dtype=fp16 is not supported"),
        ([f"+{FSDP}.mixed_precision.buffer_dtype=bf16"], "buffer_dtype=bf16 is not supported"),
        (["actor_rollout_ref.rollout.dtype=float16"], "roles and engines of a run compute in one type"),
        ([f"{FSDP}.dtype=float16", "actor_rollout_ref.rollout.dtype=bfloat16"], "compute in one type"),
    ],
)
def test_what_cannot_be_done_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(["verl"], line)


def test_a_line_without_types_computes_in_verl_s() -> None:
    config, _ = load_config(["verl"], [])
    assert config.model.dtype_on("cuda") == "bfloat16"
    assert config.actor.weights_dtype == config.actor.sharding.gradient_dtype == "float32"


def test_what_verl_ignores_is_ignored_with_a_note() -> None:
    config, notes = load_config(["verl"], [f"{OPTIM}.total_training_steps=5", f"{OPTIM}.min_lr_ratio=0.5"])
    assert config.actor.schedule.total_steps is None
    assert [note.split(" has no effect: ")[0] for note in notes] == [
        f"{OPTIM}.total_training_steps",
        f"{OPTIM}.min_lr_ratio",
    ]
