"""verl's training engines and their groups of ranks: the sizes set `sharding.context_parallel` and
`sharding.expert_parallel`."""

from operator import attrgetter
from typing import Any

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
MEGATRON, VEOMNI, TITAN = (f"{ACTOR}.{engine}" for engine in ("megatron", "veomni", "torchtitan"))
WITH_MEGATRON, WITH_VEOMNI, WITH_TITAN = (f"model_engine={name}" for name in ("megatron", "veomni", "torchtitan"))
ASYNCHRONOUS = ["trainer.mode=asynchronous", "async_training.trigger_parameter_sync_step=4"]
TOKENS = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=9000"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=4"], {"actor.context_parallel": 4, "critic.context_parallel": 1}),
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4"], {"actor.context_parallel": 4}),
        (
            # The role's older key counts if it is above 1.
            [
                f"{ACTOR}.ulysses_sequence_parallel_size=2",
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4",
                "critic.ulysses_sequence_parallel_size=1",
                "critic.fsdp.ulysses_sequence_parallel_size=8",
            ],
            {"actor.context_parallel": 2, "critic.context_parallel": 8},
        ),
        ([WITH_MEGATRON, f"{MEGATRON}.context_parallel_size=4"], {"actor.context_parallel": 4}),
        (
            [WITH_MEGATRON, f"{MEGATRON}.context_parallel_size=2", f"{MEGATRON}.tensor_model_parallel_size=4"],
            {"actor.context_parallel": 8, "actor.tensor_parallel": 1, "critic.context_parallel": 1},
        ),
        (
            ["critic.strategy=megatron", "critic.megatron.tensor_model_parallel_size=4"],
            {"actor.context_parallel": 1, "critic.context_parallel": 4},
        ),
        (
            [WITH_MEGATRON, f"{MEGATRON}.param_offload=true", "critic.megatron.optimizer_offload=true"],
            {"actor.param_offload": True, "critic.optimizer_offload": True},
        ),
        (
            [WITH_MEGATRON, f"+{MEGATRON}.override_ddp_config.grad_reduce_in_fp32=false"],
            {"actor.gradient_dtype": "bfloat16", "critic.gradient_dtype": "float32"},
        ),
        ([WITH_VEOMNI, f"{VEOMNI}.ulysses_parallel_size=4"], {"actor.context_parallel": 4, "actor.shard_size": None}),
        (
            [WITH_VEOMNI, f"{VEOMNI}.ulysses_parallel_size=2", f"{VEOMNI}.fsdp_size=4"],
            {"actor.context_parallel": 2, "actor.shard_size": 8},
        ),
        (
            [WITH_VEOMNI, f"{VEOMNI}.enable_full_shard=false", "critic.veomni.enable_fsdp_offload=true"],
            {"actor.reshard_after_forward": False, "critic.param_offload": True, "critic.optimizer_offload": True},
        ),
        (
            [
                WITH_TITAN,
                *(f"{TITAN}.{kind}_parallel_size=2" for kind in ("context", "tensor")),
                *(f"{TITAN}.data_parallel_{kind}_size=2" for kind in ("replicate", "shard")),
                f"{TITAN}.reshard_after_forward=never",
            ],
            {"actor.context_parallel": 4, "actor.shard_size": 8, "actor.reshard_after_forward": False},
        ),
        ([WITH_TITAN, f"{TITAN}.data_parallel_shard_size=8"], {"actor.shard_size": None}),
        (
            [WITH_MEGATRON, f"{MEGATRON}.expert_model_parallel_size=4", "critic.megatron.expert_model_parallel_size=2"],
            {"actor.expert_parallel": 4, "critic.expert_parallel": 2, "actor.context_parallel": 1},
        ),
        (
            [WITH_MEGATRON, *(f"{MEGATRON}.expert_{kind}_parallel_size=4" for kind in ("model", "tensor"))],
            {"actor.expert_parallel": 16},
        ),
        (
            [
                WITH_MEGATRON,
                f"{MEGATRON}.expert_model_parallel_size=8",
                f"{MEGATRON}.expert_tensor_parallel_size=null",
                f"{MEGATRON}.tensor_model_parallel_size=4",
            ],
            {"actor.expert_parallel": 8, "actor.context_parallel": 4},
        ),
        ([WITH_VEOMNI, f"{VEOMNI}.expert_parallel_size=8"], {"actor.expert_parallel": 8}),
        (
            [WITH_TITAN, *(f"{TITAN}.expert_{kind}parallel_size=2" for kind in ("", "tensor_"))],
            {"actor.expert_parallel": 4},
        ),
    ],
)
def test_a_size_sets_the_groups_of_a_role(line: list[str], expected: dict[str, Any]) -> None:
    config, _ = load_config(["verl"], line)
    keys = {key: key.replace(".", ".sharding.", 1) for key in expected}
    assert {key: attrgetter(ours)(config) for key, ours in keys.items()} == expected


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        # verl: 9000 a rank, and 9000 times the ranks that split tokens for a group. Here: the limit times the group.
        ([f"{ACTOR}.ulysses_sequence_parallel_size=4"], 9000),
        ([WITH_MEGATRON, f"{MEGATRON}.context_parallel_size=4"], 9000),
        ([WITH_MEGATRON, f"{MEGATRON}.tensor_model_parallel_size=4", f"{MEGATRON}.context_parallel_size=2"], 2250),
        ([WITH_MEGATRON, f"{MEGATRON}.tensor_model_parallel_size=7"], 1286),  # 7 * 1286 >= 9000
        ([WITH_MEGATRON, f"{MEGATRON}.pipeline_model_parallel_size=2"], 9000),
        # verl multiplies torchtitan's limit by the size for matrices.
        ([WITH_TITAN, f"{TITAN}.tensor_parallel_size=2", f"{TITAN}.context_parallel_size=4"], 2250),
        (["actor.backend=megatron", WITH_MEGATRON, f"{MEGATRON}.tensor_model_parallel_size=4"], 9000),
    ],
)
def test_a_group_gets_as_many_tokens_as_in_verl(line: list[str], limit: int) -> None:
    assert load_config(["verl"], [*TOKENS, *line])[0].actor.micro_batch_tokens == limit


def test_verl_s_default_limit_is_divided_as_well() -> None:
    line = [TOKENS[0], WITH_MEGATRON, f"{MEGATRON}.tensor_model_parallel_size=4"]
    assert load_config(["verl"], line)[0].actor.micro_batch_tokens == 16384 // 4


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ([], 4),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=4"], 16),
        ([WITH_MEGATRON, f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=4"], 32),
    ],
)
def test_micro_batches_of_all_devices_are_divided_over_groups(line: list[str], rows: int) -> None:
    devices = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    config, _ = load_config(["verl"], [f"{ACTOR}.ppo_micro_batch_size=64", *devices, *line])
    assert config.actor.micro_batch_size == rows


def test_an_engine_of_verl_s_is_replaced_with_a_note() -> None:
    for engine in ("megatron", "veomni", "torchtitan"):
        config, notes = load_config([], [f"{ACTOR}.strategy={engine}", f"critic.strategy={engine}"])
        assert (config.actor.backend, config.critic.backend) == ("fsdp", "fsdp")
        assert [note.partition(";")[0] for note in notes] == [
            f"{ACTOR}.strategy={engine}: Transformers' layers train with FSDP2"
        ]
    assert notes == load_config([], ["critic.strategy=fsdp", f"{ACTOR}.strategy=torchtitan"])[1]


def test_matrices_of_experts_that_ranks_divide_become_whole_experts_with_a_note() -> None:
    key = f"{MEGATRON}.expert_tensor_parallel_size"
    notes = load_config(["verl"], [WITH_MEGATRON, f"{MEGATRON}.expert_model_parallel_size=2", f"{key}=4"])[1]
    assert [note for note in notes if key in note] == [
        f"{key}=4: actor.sharding.expert_parallel=8, whose ranks divide whole experts instead of their matrices"
    ]


def test_our_own_setting_keeps_megatron_s_layers_and_their_matrices() -> None:
    sizes = [f"{MEGATRON}.tensor_model_parallel_size=4", f"{MEGATRON}.context_parallel_size=2"]
    for line in (["actor.backend=megatron", WITH_MEGATRON], [f"{ACTOR}.strategy=megatron", "actor.backend=megatron"]):
        config, notes = load_config([], [*line, *sizes])
        assert (config.actor.backend, config.critic.backend) == ("megatron", "fsdp")
        assert (config.actor.sharding.tensor_parallel, config.actor.sharding.context_parallel) == (4, 2)
        assert notes == []


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ([f"{REF}.ulysses_sequence_parallel_size=8"], "the reference uses the actor's sharding"),
        ([f"{REF}.megatron.tensor_model_parallel_size=8"], "the reference uses the actor's sharding"),
        ([f"{REF}.veomni.ulysses_parallel_size=8"], "the reference uses the actor's sharding"),
        ([f"{REF}.torchtitan.context_parallel_size=8"], "the reference uses the actor's sharding"),
        ([WITH_MEGATRON, f"{ACTOR}.ulysses_sequence_parallel_size=2"], f"{ACTOR}.strategy is not fsdp"),
        ([f"{MEGATRON}.tensor_model_parallel_size=2"], f"{ACTOR}.strategy is not megatron"),
        ([WITH_MEGATRON, f"{VEOMNI}.ulysses_parallel_size=2"], f"{ACTOR}.strategy is not veomni"),
        ([WITH_MEGATRON, f"{MEGATRON}.pipeline_model_parallel_size=2"], "every rank computes all layers"),
        ([WITH_MEGATRON, f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"], "every rank computes all layers"),
        ([WITH_TITAN, f"{TITAN}.pipeline_parallel_size=2"], "every rank computes all layers"),
        ([WITH_MEGATRON, f"{MEGATRON}.sequence_parallel=False"], "ranks of sharding.context_parallel split the tokens"),
        ([WITH_MEGATRON, f"{MEGATRON}.use_dist_checkpointing=True"], "weights are read from model.path"),
        ([WITH_MEGATRON, f"{MEGATRON}.dist_checkpointing_path=/m"], "weights are read from model.path"),
        ([WITH_MEGATRON, f"+{MEGATRON}.override_ddp_config.overlap_grad_reduce=True"], "FSDP2 shards weights"),
        ([WITH_VEOMNI, f"{VEOMNI}.rms_norm_implementation=triton"], "log-probs are always computed in chunks"),
        ([WITH_VEOMNI, f"{ACTOR}.optim.lr_warmup_steps=5"], "verl reads lr_warmup_steps_ratio alone with veomni"),
    ],
)
def test_a_key_that_only_says_how_ranks_compute_has_no_effect_and_a_note(line: list[str], note: str) -> None:
    config, notes = load_config([], line)
    (said,) = [said for said in notes if "has no effect" in said]
    assert said.startswith(f"{line[-1].lstrip('+').partition('=')[0]} has no effect: {note}")
    assert config.actor.sharding == load_config([], line[:-1])[0].actor.sharding


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=0"], "expected a whole number above 0"),
        ([WITH_MEGATRON, f"{MEGATRON}.tensor_model_parallel_size=two"], "expected a whole number above 0"),
        ([WITH_MEGATRON, f"{MEGATRON}.expert_model_parallel_size=0"], "expected a whole number above 0"),
        (
            [WITH_MEGATRON, "actor.backend=megatron", f"{MEGATRON}.expert_model_parallel_size=2"],
            "does not support sharding.expert_parallel=2",
        ),
        ([WITH_MEGATRON, f"{MEGATRON}.router_replay.mode=record"], "router_replay.mode=record is not supported here"),
        (["critic.strategy=megatron", "critic.megatron.router_replay.mode=R2"], "is not supported here"),
        ([WITH_MEGATRON, f"{MEGATRON}.qat.enable=True"], "there is no quantisation"),
        ([WITH_MEGATRON, f"{MEGATRON}.dynamic_context_parallel=True"], "is not supported here"),
        ([WITH_MEGATRON, f"+{MEGATRON}.override_ddp_config.fp8_param_gather=True"], "there is no such setting"),
        ([WITH_MEGATRON, f"+{MEGATRON}.override_mcore_model_config.moe_config.freeze_moe_router=True"], "experts"),
        ([WITH_MEGATRON, f"{ACTOR}.optim.main_grads_dtype=bf16"], "main_grads_dtype=bf16 is not supported here"),
        ([WITH_MEGATRON, f"{ACTOR}.optim.exp_avg_dtype=bf16"], "exp_avg_dtype=bf16 is not supported here"),
        ([WITH_VEOMNI, f"{VEOMNI}.mixed_precision=false"], "mixed_precision=false is not supported here"),
        ([WITH_VEOMNI, f"{VEOMNI}.attn_implementation=native-sparse"], "native-sparse is not supported here"),
        ([WITH_VEOMNI, f"{ACTOR}.optim.lr_decay_ratio=0.5"], "lr_decay_ratio=0.5 is not supported here"),
        ([WITH_TITAN, f"{ACTOR}.optim.decay_type=sqrt"], "decay_type=sqrt is not supported here"),
        ([WITH_TITAN, f"{ACTOR}.optim.lr_warmup_steps=5"], "one update ahead"),
        ([WITH_TITAN, *ASYNCHRONOUS], "ends its linear schedule"),
    ],
)
def test_what_changes_the_result_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(["verl"], line)


@pytest.mark.parametrize(
    ("line", "schedule", "least"),
    [
        ([WITH_MEGATRON], "constant", 0),
        ([WITH_VEOMNI], "cosine", 0),
        ([WITH_VEOMNI, f"{ACTOR}.optim.lr=1e-5", f"{ACTOR}.optim.lr_min=1e-6"], "cosine", 0.1),
        ([WITH_VEOMNI, f"{ACTOR}.optim.lr_scheduler_type=constant"], "constant", 0),
        ([WITH_TITAN], "linear", 0),
        ([WITH_TITAN, f"{ACTOR}.optim.decay_type=cosine", f"{ACTOR}.optim.min_lr_factor=0.1"], "cosine", 0.1),
        ([WITH_TITAN, f"{ACTOR}.strategy=fsdp"], "constant", 0),
    ],
)
def test_an_engine_brings_its_default_schedule(line: list[str], schedule: str, least: float) -> None:
    config, _ = load_config(["verl"], line)
    assert (config.actor.schedule.name, config.actor.schedule.model_dump()["min_ratio"]) == (
        schedule,
        pytest.approx(least),
    )


def test_as_in_megatron_weight_decay_leaves_out_biases_and_norms() -> None:
    config, notes = load_config(["verl"], [WITH_MEGATRON, f"{ACTOR}.optim.weight_decay=0.1"])
    assert (config.actor.weight_decay, config.actor.optimizer.decay_biases_and_norms) == (0.1, False)
    assert not [note for note in notes if "weight_decay" in note]
    by_default, _ = load_config(["verl"], [WITH_MEGATRON])
    assert (by_default.actor.weight_decay, by_default.actor.optimizer.decay_biases_and_norms) == (0.01, False)
    fsdp, _ = load_config(["verl"], [f"{ACTOR}.optim.weight_decay=0.1"])
    assert fsdp.actor.optimizer.decay_biases_and_norms


def test_megatron_s_type_is_the_run_s() -> None:
    config, _ = load_config(["verl"], [WITH_MEGATRON, f"{MEGATRON}.dtype=float16"])
    assert config.model.dtype == "float16"
    with pytest.raises(ConfigError, match="compute in one type"):
        load_config(["verl"], [WITH_MEGATRON, f"{MEGATRON}.dtype=float16", "actor_rollout_ref.rollout.dtype=bfloat16"])


@pytest.mark.parametrize(
    ("line", "replay"),
    [
        ([f"{ACTOR}.router_replay.mode=R2"], "recompute"),
        ([f"{ACTOR}.router_replay.mode=R3"], "engine"),
        ([WITH_MEGATRON, f"{MEGATRON}.router_replay.mode=R3", f"{ACTOR}.router_replay.mode=disabled"], "engine"),
        ([WITH_VEOMNI, f"{VEOMNI}.router_replay.mode=R2"], "recompute"),
        ([f"{MEGATRON}.router_replay.mode=R3"], "off"),
        ([f"{ACTOR}.router_replay.mode=disabled"], "off"),
    ],
)
def test_experts_are_repeated_as_verl_says(line: list[str], replay: str) -> None:
    assert load_config([], line)[0].actor.router_replay == replay
