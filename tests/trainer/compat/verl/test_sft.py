"""verl's fine-tuning command lines: `sft_trainer`, and the older `fsdp_sft_trainer`."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from trainer.compat.settings import load_config
from trainer.compat.verl.sft import DIALECT
from trainer.config.sft import SftConfig
from trainer.errors import ConfigError
from trainer.main_ppo import preset_of

NEW, OLD = "verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer"


def read(entry: str, *line: str) -> tuple[SftConfig, list[str]]:
    return load_config([preset_of(entry)], line, SftConfig)


def test_the_defaults_are_verl_s() -> None:
    new, notes = read(NEW)
    assert notes == []
    assert (new.sft.messages_key, new.sft.max_length, new.data.train_batch_size) == ("messages", 1024, 256)
    assert (new.actor.learning_rate, new.actor.weight_decay, new.actor.schedule.name) == (1e-3, 0.01, "constant")
    assert (new.actor.micro_batch_tokens, new.trainer.total_epochs, new.trainer.save_freq) == (8192, 4, -1)
    old, notes = read(OLD)
    assert [note.partition(":")[0] for note in notes] == ["fsdp_sft_trainer"]  # its loss
    assert (old.sft.messages_key, old.data.prompt_key, old.sft.response_key) == (None, "question", "answer")
    assert (old.actor.learning_rate, old.actor.optimizer.betas) == (1e-5, (0.9, 0.95))
    assert (old.actor.schedule.name, old.actor.schedule.warmup_ratio) == ("cosine", 0.1)
    assert (old.actor.micro_batch_size, old.actor.micro_batch_tokens) == (4, None)


@pytest.mark.parametrize(
    ("entry", "line", "ours"),
    [
        (NEW, ["model.path=/m"], {"model.path": Path("/m")}),
        (OLD, ["model.partial_pretrain=/m"], {"model.path": Path("/m")}),
        (NEW, ["data.messages_key=turns"], {"sft.messages_key": "turns"}),
        (OLD, ["data.multiturn.enable=true", "data.multiturn.messages_key=m"], {"sft.messages_key": "m"}),
        (
            OLD,
            [
                "data.prompt_key=extra_info",
                "data.response_key=extra_info",
                "data.prompt_dict_keys=['question']",
                "+data.response_dict_keys=['answer']",
            ],
            {"data.prompt_key": "extra_info.question", "sft.response_key": "extra_info.answer"},
        ),
        (OLD, ["data.prompt_dict_keys=[a,b]"], {"data.prompt_key": "question.a.b"}),
        (NEW, ["data.max_length=2048", "data.truncation=right"], {"data.overlong_prompts": "truncate_right"}),
        (NEW, ["data.truncation=left", "data.pad_mode=right"], {"data.overlong_prompts": "truncate_left"}),
        (OLD, ["data.truncation=left"], {"data.overlong_prompts": "truncate_left"}),
        (NEW, ["data.use_dynamic_bsz=False"], {"actor.micro_batch_tokens": None}),
        (NEW, ["data.max_token_len_per_gpu=2048"], {"actor.micro_batch_tokens": 2048}),
        (NEW, ["data.val_files=null"], {"data.validation_files": []}),
        (
            NEW,
            ["data.enable_thinking_default=false", "+data.apply_chat_template_kwargs.a=1"],
            {"data.chat_template_kwargs": {"a": 1, "enable_thinking": False}},
        ),
        (NEW, ["model.lora_rank=32", "model.lora_alpha=16"], {"actor.lora.rank": 32, "actor.lora.alpha": 16}),
        (NEW, ["model.enable_gradient_checkpointing=False"], {"actor.activation_checkpointing": False}),
        (NEW, ["engine=fsdp", "optim=fsdp", "engine.strategy=fsdp2"], {"actor.backend": "fsdp"}),
        (NEW, ["engine.fsdp_size=2"], {"actor.sharding.shard_size": 2}),
        (NEW, ["engine.ulysses_sequence_parallel_size=2"], {"actor.sharding.context_parallel": 2}),
        (OLD, ["ulysses_sequence_parallel_size=2"], {"actor.sharding.context_parallel": 2}),
        (NEW, ["engine.model_dtype=bf16"], {"actor.weights_dtype": "bfloat16"}),
        (OLD, ["model.fsdp_config.model_dtype=bf16"], {"actor.weights_dtype": "bfloat16"}),
        (OLD, ["model.fsdp_config.cpu_offload=True"], {"actor.sharding.optimizer_offload": True}),
        (
            NEW,
            ["optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps_ratio=0.2", "optim.min_lr_ratio=0.1"],
            {"actor.schedule.name": "cosine", "actor.schedule.warmup_ratio": 0.2, "actor.schedule.min_ratio": 0.1},
        ),
        (NEW, ["optim.warmup_style=cosine", "optim.lr_warmup_steps=10"], {"actor.schedule.warmup_steps": 10}),
        (NEW, ["optim.betas=[0.9,0.95]", "optim.clip_grad=0.5"], {"actor.max_gradient_norm": 0.5}),
        (OLD, ["optim.lr_scheduler=wsd"], {"actor.schedule.name": "wsd"}),
        (NEW, [], {"data.drop_last": True, "trainer.stop_after_epochs": True}),
        (OLD, [], {"data.drop_last": True, "trainer.stop_after_epochs": True}),
        (NEW, ["trainer.default_local_dir=/o", "trainer.total_training_steps=7"], {"trainer.total_steps": 7}),
        (NEW, ["trainer.max_ckpt_to_keep=5"], {"trainer.keep_checkpoints": 5}),
        (NEW, ["trainer.seed=1111"], {"trainer.seed": 1111}),
    ],
)
def test_a_key_has_its_meaning_here(entry: str, line: list[str], ours: dict[str, Any]) -> None:
    config, _ = read(entry, *line)
    assert {key: attrgetter(key)(config) for key in ours} == ours


@pytest.mark.parametrize(
    ("entry", "line", "words"),
    [
        (NEW, ["engine=megatron", "engine.tensor_model_parallel_size=2"], r"^engine=megatron is not supported"),
        (NEW, ["model.mtp.enable=True"], "there is no multi-token prediction"),
        (NEW, ["data.custom_cls.path=a.py"], "data.custom_cls.path=a.py is not supported"),
        (NEW, ["trainer.test_freq=after_each_epoch"], "trainer.test_freq=after_each_epoch is not supported"),
        (NEW, ["data.tools_key=functions"], "data.tools_key=functions is not supported"),
        (NEW, ["data.max_lenght=8"], r"data\.max_lenght: there is no such setting"),
        (NEW, ["engine.fsdp_sizes=8"], r"engine\.fsdp_sizes: there is no such setting"),
        (NEW, ["data.prompt_key=question"], "data.prompt_key has no effect with sft.messages_key=messages"),
        (NEW, ["actor_rollout_ref.actor.optim.lr=1"], "there is no such setting"),
        (OLD, ["optim.lr_scheduler=linear"], "optim.lr_scheduler=linear is not supported"),
        (NEW, ["trainer.device=npu"], "trainer.device=npu is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused(entry: str, line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(entry, *line)


@pytest.mark.parametrize(
    ("entry", "line", "note"),
    [
        (NEW, "data.train_max_samples=10", "verl takes the first rows"),
        (NEW, "data.val_max_samples=10", "verl takes the first rows"),
        (NEW, "data.truncation=left", "cuts the right side"),
        (NEW, "data.ignore_input_ids_mismatch=True", "has the tokens of its whole text"),
        (NEW, "checkpoint.save_contents=[model]", "a checkpoint always holds everything"),
        (OLD, "trainer.total_training_steps=1", "over those of trainer.total_epochs"),
        (OLD, "data.response_key=answer", "here the chat template ends them"),
        (OLD, "data.micro_batch_size=4", "data.micro_batch_size_per_gpu counts"),
    ],
)
def test_a_difference_is_noted(entry: str, line: str, note: str) -> None:
    assert any(note in message for message in read(entry, line)[1])


def test_every_default_of_verl_is_accepted() -> None:
    groups = ("data.prompt", "data.response", "optim.", "data.multiturn", "data.max_token", "data.messages_key")
    line = {key: default for key, default in DIALECT.defaults.items() if not key.startswith(groups)}
    read(NEW, *(f"{key}={'null' if default is None else default}" for key, default in line.items()))
