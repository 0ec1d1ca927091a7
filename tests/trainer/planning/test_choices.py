"""The settings that follow from model, lengths and memory, on GPUs that need not be here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.planning.sizes import SIZES, with_memory, write_sizes
from trainer.cluster.nodes import ClusterNode, Slot, numbered_slots
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.planning.activations import gathered_bytes, pass_bytes
from trainer.planning.choices import FILLED, with_choices
from trainer.planning.memory import GIB, GRAPHS_GIB, PROCESS_GIB, check_fit, copied_gib, shares, size_of, tight
from trainer.planning.model_size import ModelSize
from trainer.planning.placement import place_roles, roles_of
from trainer.planning.plan import Plan, plan_of

H200, H100 = 139.8, 79.2


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in SIZES:
        write_sizes(name, root / name)
    return root


@pytest.fixture
def plan(models: Path) -> Callable[..., Plan]:
    def made(
        model: str,
        gpus: int,
        *gpu_gib: float | None,
        device: str = "cuda",
        node_gib: float | None = None,
        **sections: Any,
    ) -> Plan:
        """The plan for a node with so many GPUs for each size of them."""
        config = Config.model_validate({"model": {"path": models / model}, **sections})
        nodes = [ClusterNode(f"id{at}", f"10.0.0.{at}", 64, gpus, gib, node_gib) for at, gib in enumerate(gpu_gib)]
        slots = numbered_slots(nodes, gpus if device == "cuda" else 0, group=None)
        return plan_of(config, slots, roles_of(config))

    return made


def chosen(plan: Plan) -> dict[str, float]:
    return {choice.key: choice.value for choice in plan.choices}


def reasons(plan: Plan) -> dict[str, str]:
    return {choice.key: choice.reason for choice in plan.choices}


GRPO = {"algorithm": {"advantage": "grpo"}}
OFFLOADED = {"actor": {"sharding": {"optimizer_offload": True, "param_offload": True}}}


def grpo(prompts: int, prompt: int, response: int, **rollout: Any) -> dict[str, Any]:
    return {
        **GRPO,
        "data": {"train_batch_size": prompts, "max_prompt_length": prompt, "max_response_length": response},
        "rollout": {"samples_per_prompt": 8, **rollout},
    }


def quantised(sections: dict[str, Any]) -> dict[str, Any]:
    return {
        **sections,
        "algorithm": {**sections["algorithm"], "correction": "tis"},
        "rollout": {**sections["rollout"], "quantization": "fp8"},
    }


def test_long_answers_of_a_large_gpu_all_fit_into_the_cache_of_one_engine(plan: Callable[..., Plan]) -> None:
    assert chosen(plan("1.5B", 1, H200, **grpo(64, 512, 2048))) == {
        "rollout.max_num_seqs": 512,
        "rollout.kv_cache_gib": 30.3,  # 512 x 2,048 and 64 x 512 tokens of 28,672 bytes, and a twentieth
        "actor.micro_batch_tokens": 16384,
    }


def test_engines_take_as_many_responses_as_a_cuda_graph_is_for(plan: Callable[..., Plan]) -> None:
    planned = plan("1.5B", 1, H200, **grpo(37, 512, 512), actor={"mini_batch_size": 296})
    assert chosen(planned)["rollout.max_num_seqs"] == 304
    assert reasons(planned)["rollout.max_num_seqs"] == (
        "an engine has 296 responses in a step, rounded up to the size of a CUDA graph"
    )


@pytest.mark.parametrize("response", [512, 2048])
def test_a_small_model_gets_one_engine_and_large_micro_batches(plan: Callable[..., Plan], response: int) -> None:
    choices = chosen(plan("0.5B", 1, H200, data={"max_prompt_length": 256, "max_response_length": response}))
    assert "rollout.engines_per_gpu" not in choices
    assert choices["actor.micro_batch_tokens"] == choices["critic.micro_batch_tokens"] == 32768


def test_a_row_that_does_not_fit_is_checkpointed_and_the_cache_takes_what_is_left(plan: Callable[..., Plan]) -> None:
    planned = plan("7B", 4, H100, **grpo(128, 1024, 15360))
    values = chosen(planned)
    assert values["actor.activation_checkpointing"] is True
    assert values["actor.micro_batch_tokens"] == 16384
    assert "of 256 responses at their full length" in reasons(planned)["rollout.kv_cache_gib"]
    assert values["rollout.kv_cache_gib"] < 55


def test_ranks_that_compute_rows_together_need_room_for_a_part_of_a_row(plan: Callable[..., Plan]) -> None:
    sections = grpo(128, 1024, 31744)
    alone = chosen(plan("7B", 4, H100, **sections))
    together = chosen(plan("7B", 4, H100, **sections, actor={"sharding": {"context_parallel": 2}}))
    assert (alone["actor.micro_batch_tokens"], together["actor.micro_batch_tokens"]) == (32768, 16384)


def test_ranks_compute_a_row_together_that_is_too_long_for_one(plan: Callable[..., Plan], models: Path) -> None:
    qwen2 = write_sizes("7B", models / "qwen2")
    config = json.loads((qwen2 / "config.json").read_text())
    (qwen2 / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    long, longer, longest = (plan("qwen2", 8, H100, **grpo(128, 1024, length)) for length in (64_512, 500_000, 900_000))
    assert chosen(long)["actor.sharding.context_parallel"] == 4
    assert "actor.activation_checkpointing" not in chosen(long)
    assert "without computing activations again" in reasons(long)["actor.sharding.context_parallel"]
    alone = plan("qwen2", 8, H100, **grpo(128, 1024, 64_512), actor={"activation_checkpointing": True})
    assert "actor.sharding.context_parallel" not in chosen(alone)
    assert chosen(longer)["actor.sharding.context_parallel"] == 4
    assert chosen(longer)["actor.micro_batch_tokens"] == 501_024 / 4
    assert "a row may have 501,024 tokens" in reasons(longer)["actor.sharding.context_parallel"]
    # Eight ranks would have room, but do not divide 28 heads.
    assert "actor.sharding.context_parallel" not in chosen(longest)


def test_ranks_share_rows_only_where_reference_and_teacher_can(plan: Callable[..., Plan], models: Path) -> None:
    heads = {"heads28": 28, "heads18": 18}
    for name, number in heads.items():
        config = write_sizes("7B", models / name) / "config.json"
        shape = {"model_type": "qwen2", "num_attention_heads": number, "num_key_value_heads": 2}
        config.write_text(json.dumps(json.loads(config.read_text()) | shape))
    sections = grpo(128, 1024, 500_000)
    setting = "actor.sharding.context_parallel"
    assert chosen(plan("heads28", 8, H100, **sections))[setting] == 4
    six = {"device_mapping": {"reference": "0,1,2,3,4,5"}}
    assert setting not in chosen(plan("heads28", 8, H100, **sections, **six))
    for teacher, expected in (("heads28", 4), ("heads18", None)):
        taught = {"distillation": {"teacher": models / teacher}}
        assert chosen(plan("heads28", 8, H100, **sections, **taught)).get(setting) == expected


def test_all_weights_of_7b_train_on_one_gpu_by_default(plan: Callable[..., Plan]) -> None:
    sections = grpo(16, 256, 1024) | {"actor": {"mini_batch_size": 128, "kl_loss_coefficient": 0.001}}
    planned = plan("7B", 1, H200, **sections)
    assert chosen(planned)["actor.sharding.optimizer_offload"] is True
    assert chosen(planned)["actor.micro_batch_tokens"] >= 8192
    assert tight(planned.shares) is None
    kept = plan("7B", 1, H200, **sections | {"actor": {**sections["actor"], "sharding": {"optimizer_offload": False}}})
    assert "actor.sharding.optimizer_offload" not in chosen(kept)


def test_optimizer_states_are_offloaded_only_where_the_node_has_room_for_them(plan: Callable[..., Plan]) -> None:
    little, enough = (plan("7B", 1, H200, node_gib=gib, **grpo(16, 256, 1024)) for gib in (60.0, 500.0))
    offloaded = ["actor.sharding.optimizer_offload" in chosen(planned) for planned in (little, enough)]
    assert offloaded == [False, True]
    assert any("offloaded to the memory of 10.0.0.0: " in line and "of 500.0 GiB" in line for line in enough.lines())


def test_a_plan_warns_of_more_offload_than_a_node_has_memory(plan: Callable[..., Plan]) -> None:
    lines = list(plan("7B", 1, H200, node_gib=60.0, **grpo(16, 256, 1024), actor=OFFLOADED["actor"]).lines())
    assert any(line.startswith("warning: 10.0.0.0 lacks ") for line in lines)


def test_a_small_model_stays_on_its_gpu(plan: Callable[..., Plan]) -> None:
    assert not [key for key in chosen(plan("1.5B", 1, H200, **grpo(64, 512, 2048))) if "offload" in key]


def test_responses_to_a_long_prompt_fit_into_a_micro_batch_with_it(plan: Callable[..., Plan]) -> None:
    planned = plan("1.5B", 1, H200, **grpo(16, 30_720, 1024))
    assert chosen(planned)["actor.micro_batch_tokens"] == 30_720 + 8 * 1024
    apart = plan("1.5B", 1, H200, **grpo(16, 30_720, 1024), actor={"share_prompts": False})
    assert chosen(apart)["actor.micro_batch_tokens"] == 30_720 + 1024


def test_engines_over_two_gpus_hold_half_a_cache_each_and_twice_the_responses(plan: Callable[..., Plan]) -> None:
    whole, two = (chosen(plan("7B", 4, H200, **grpo(64, 512, 1024, tensor_parallel=size))) for size in (1, 2))
    assert (whole["rollout.max_num_seqs"], two["rollout.max_num_seqs"]) == (128, 256)
    assert two["rollout.kv_cache_gib"] == pytest.approx(whole["rollout.kv_cache_gib"], abs=0.1)


def test_the_cache_leaves_room_for_the_weights_that_engines_copy(plan: Callable[..., Plan]) -> None:
    planned = plan("7B", 4, H100, **grpo(128, 1024, 15360))
    first = [share for share in planned.shares if share.slot.rank == 0]
    weights, embedding = 2 * SIZES["7B"][-1] / GIB, 2 * 151_936 * 3584 / GIB
    copied = 2 + embedding
    assert copied_gib(planned.config, planned.placement) == pytest.approx(copied)
    cache = chosen(planned)["rollout.kv_cache_gib"]
    engine = next(share for share in first if share.role == "rollout")
    assert engine.working == pytest.approx(weights + GRAPHS_GIB + cache + copied)
    assert sum(share.resting for share in first) + engine.working <= FILLED * H100


def test_engines_that_do_not_sleep_add_the_copy_in_their_turn(plan: Callable[..., Plan]) -> None:
    planned = plan("1.5B", 1, H200, **grpo(64, 512, 2048, sleep=False, kv_cache_gib=10))
    engine = next(share for share in planned.shares if share.role == "rollout")
    weights = 2 * SIZES["1.5B"][-1] / GIB
    copied = 2 + 2 * 151_936 * 1536 / GIB
    assert (engine.resting, engine.working) == (
        pytest.approx(PROCESS_GIB + weights + GRAPHS_GIB + 10),
        pytest.approx(copied),
    )


def test_engines_that_quantise_copy_all_weights_at_once(plan: Callable[..., Plan]) -> None:
    planned = plan("7B", 4, H100, **quantised(grpo(64, 512, 512)))
    assert copied_gib(planned.config, planned.placement) == pytest.approx(2 * SIZES["7B"][-1] / GIB)


@pytest.mark.parametrize(("transfer", "buckets"), [("broadcast", 2), ("object_store", 1)])
def test_the_cache_of_an_engine_apart_leaves_room_for_the_buckets_that_arrive(
    plan: Callable[..., Plan], transfer: str, buckets: int
) -> None:
    apart = {"device_mapping": {"actor": "0", "reference": "0", "rollout": "1"}}
    planned = plan("1.5B", 2, H100, **grpo(128, 1024, 15360, weight_transfer=transfer), **apart)
    engine = next(share for share in planned.shares if share.role == "rollout")
    copied = buckets / 2 + 2 * 151_936 * 1536 / GIB
    assert copied_gib(planned.config, planned.placement) == pytest.approx(copied)
    cache = chosen(planned)["rollout.kv_cache_gib"]
    assert engine.working == pytest.approx(2 * SIZES["1.5B"][-1] / GIB + GRAPHS_GIB + cache + copied)
    assert FILLED * H100 - 0.1 <= engine.resting + engine.working <= FILLED * H100


@pytest.mark.parametrize(("lora", "has_room"), [("adapters", False), ("merged", True)])
def test_only_merged_adapters_need_room_on_their_way(plan: Callable[..., Plan], lora: str, has_room: bool) -> None:
    job = grpo(64, 512, 512)
    job["rollout"]["lora"] = lora
    settings = plan("1.5B", 2, H200, **job, actor={"lora": {"rank": 8}})
    assert (copied_gib(settings.config, settings.placement) > 0) == has_room


APART = {"device_mapping": {"actor": "0,1", "reference": "0,1", "rollout": "2,3"}}


def sent(plan: Plan) -> list[tuple[int, float]]:
    """The ranks of the devices that hold weights to send, and the GiB that these add."""
    return [(share.slot.rank, share.resting + share.working) for share in plan.shares if share.role == "sync_weights"]


@pytest.mark.parametrize("actor", ["0,1", "1"])
def test_the_actor_s_first_rank_holds_all_weights_while_it_broadcasts_them(
    plan: Callable[..., Plan], actor: str
) -> None:
    sections = {"device_mapping": {"actor": actor, "rollout": "2,3"}}
    assert sent(plan("7B", 4, H200, **grpo(64, 512, 1024), **sections)) == [
        (int(actor[0]), pytest.approx(2 * SIZES["7B"][-1] / GIB))
    ]


def test_offloaded_weights_are_on_the_gpu_while_they_are_sent(plan: Callable[..., Plan]) -> None:
    planned = plan("7B", 4, H200, **grpo(64, 512, 1024), **APART, **OFFLOADED)
    assert sent(planned) == [(0, pytest.approx((2 + 4 / 2) * SIZES["7B"][-1] / GIB))]


@pytest.mark.parametrize(
    "sections",
    [
        {},  # on shared GPUs
        {**APART, "actor": {"lora": {"rank": 8}}, "rollout": {"lora": "adapters"}},
        {**APART, "rollout": {"weight_transfer": "object_store"}},
        {**APART, "rollout": {"engines_per_gpu": 2, "kv_cache_gib": 10}},
        {**APART, "trainer": {"deterministic": True}},
    ],
)
def test_without_a_broadcast_no_rank_holds_all_weights(plan: Callable[..., Plan], sections: dict[str, Any]) -> None:
    assert sent(plan("1.5B", 4, H200, **{**grpo(64, 512, 1024), **sections})) == []


def test_sent_weights_are_gone_when_a_pass_begins(plan: Callable[..., Plan]) -> None:
    ways = ("broadcast", "object_store")
    broadcast, stored = (
        chosen(plan("7B", 4, H200, **grpo(64, 512, 1024, weight_transfer=way), **APART)) for way in ways
    )
    assert broadcast == stored


def test_a_model_too_large_for_a_broadcast_is_refused_and_goes_through_the_object_store(
    plan: Callable[..., Plan],
) -> None:
    """All weights have 61 GiB; a rank keeps 46 of weights and states, and 8 of the reference."""
    nodes = {"actor": "node0:0,1,2,3,4,5,6,7", "reference": "node0:0,1,2,3,4,5,6,7", "rollout": "node1:0,1,2,3"}
    sections = {**grpo(128, 512, 1024, tensor_parallel=4), "device_mapping": nodes}
    with pytest.raises(ConfigError, match=r"cuda 0 .* that are needed: actor .*, sync_weights 61\.0") as caught:
        plan("32B", 8, H100, H100, **sections)
    assert caught.value.hint.startswith("set rollout.weight_transfer=object_store: then")
    sections["rollout"]["weight_transfer"] = "object_store"
    assert sent(plan("32B", 8, H100, H100, **sections)) == []


def test_a_large_model_shares_its_gpus_with_engines(plan: Callable[..., Plan]) -> None:
    """All weights together have 61 GiB."""
    planned = plan("32B", 16, H100, **grpo(128, 1024, 4096, tensor_parallel=8), **OFFLOADED)
    assert chosen(planned)["rollout.kv_cache_gib"] > 20


def test_a_model_whose_copy_does_not_fit_beside_the_engines_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"less than the .* that are needed: rollout 92\.7, actor"):
        plan("32B", 16, H100, **quantised(grpo(128, 1024, 4096, tensor_parallel=8)), **OFFLOADED)


def test_a_gpu_of_24_gib_gives_a_small_model_a_cache(plan: Callable[..., Plan]) -> None:
    choices = chosen(plan("0.5B", 1, 23.6))
    assert "rollout.engines_per_gpu" not in choices
    assert choices["rollout.kv_cache_gib"] > 0


@pytest.mark.parametrize("transfer", ["auto", "broadcast"])
def test_weights_can_be_broadcast_to_the_engine_of_a_small_model(plan: Callable[..., Plan], transfer: str) -> None:
    apart = {"actor": "0", "rollout": "1"}
    planned = plan("0.5B", 2, H200, **grpo(64, 256, 512, weight_transfer=transfer), device_mapping=apart)
    assert planned.config.rollout.engines_per_gpu == 1


@pytest.mark.parametrize(("staleness", "steps"), [(0, 1), (0.5, 2), (1, 2), (2.5, 4)])
def test_asynchronous_engines_hold_the_responses_of_all_steps_in_flight(
    plan: Callable[..., Plan], staleness: float, steps: int
) -> None:
    sections = {**grpo(16, 256, 1024), "algorithm": {"advantage": "grpo", "correction": "none"}}
    synchronous = chosen(plan("1.5B", 1, H200, **sections))
    trainer = {"mode": "asynchronous", "max_staleness": staleness}
    several = chosen(plan("1.5B", 1, H200, **sections, trainer=trainer))
    assert several["rollout.max_num_seqs"] == steps * synchronous["rollout.max_num_seqs"] == steps * 128
    assert several["rollout.kv_cache_gib"] == pytest.approx(
        steps * synchronous["rollout.kv_cache_gib"], abs=0.1 * steps
    )


def test_validation_samples_more_at_a_time_from_the_same_cache(plan: Callable[..., Plan]) -> None:
    sections = grpo(16, 256, 1024)
    plain = chosen(plan("1.5B", 4, H200, **sections))
    sections["data"] |= {"validation_files": ["/data/validation.parquet"]}
    planned = plan("1.5B", 4, H200, **sections)
    validated = chosen(planned)
    assert (plain["rollout.max_num_seqs"], validated["rollout.max_num_seqs"]) == (32, 64)
    assert validated["rollout.kv_cache_gib"] == plain["rollout.kv_cache_gib"]
    assert reasons(planned)["rollout.max_num_seqs"] == (
        "an engine has 32 responses in a step, and validation sends all its prompts at once"
    )


def test_gpus_beyond_the_key_value_heads_hold_copies_of_them(plan: Callable[..., Plan]) -> None:
    two, four = (chosen(plan("3B", gpus, H200, **grpo(16, 512, 1024, tensor_parallel=gpus))) for gpus in (2, 4))
    assert two["rollout.kv_cache_gib"] == four["rollout.kv_cache_gib"] == 2.5  # 139,264 tokens of 18,432 bytes


WEIGHTS, GRADIENTS = "sharding.resharding_interval", "sharding.gradient_sync_interval"


def ppo(**actor: Any) -> dict[str, Any]:
    """512 responses of 768 tokens with their prompts, and one optimizer step."""
    data = {"train_batch_size": 512, "max_prompt_length": 256, "max_response_length": 512}
    return {"data": data, "actor": {"mini_batch_size": 512, **actor}, "critic": {"mini_batch_size": 512}}


def test_ranks_with_room_gather_weights_and_average_gradients_once_in_an_update(plan: Callable[..., Plan]) -> None:
    planned = plan("1.5B", 2, H100, **ppo())
    values = chosen(planned)
    for role in ("actor", "critic"):
        micro_batches = 512 / 2 * 768 / values[f"{role}.micro_batch_tokens"]
        assert values[f"{role}.{WEIGHTS}"] == values[f"{role}.{GRADIENTS}"] == micro_batches == 12
    assert reasons(planned)[f"actor.{WEIGHTS}"].startswith("weights stay gathered during a pass, which takes 2.3 of ")
    assert tight(planned.shares) is None


def test_whole_weights_may_fit_where_whole_gradients_do_not(plan: Callable[..., Plan]) -> None:
    apart = {"actor": "0,1,2,3", "critic": "0,1,2,3", "reference": "0,1,2,3", "rollout": "4,5,6,7"}
    values = chosen(plan("7B", 8, H200, **ppo(), device_mapping=apart))
    assert (f"actor.{WEIGHTS}" in values, f"actor.{GRADIENTS}" in values) == (True, False)


def test_the_actor_gathers_its_weights_once_where_the_reference_has_room_for_them_too(
    plan: Callable[..., Plan],
) -> None:
    nodes = dict.fromkeys(("actor", "critic", "rollout"), "node0:0,1,2,3") | {"reference": "node1:0,1,2,3"}
    small, large = (chosen(plan("7B", 4, H200, gib, **ppo(), device_mapping=nodes)) for gib in (17.0, 23.6))
    assert small.keys() ^ large.keys() == {f"actor.{WEIGHTS}"}


@pytest.mark.parametrize(
    ("gpus", "actor"),
    [
        (1, {}),  # nothing is exchanged
        (2, {"sharding": {"tensor_parallel": 2}}),
        (2, {"sharding": {"resharding_interval": 1, "gradient_sync_interval": 1}}),
        (2, {"micro_batch_size": 4}),  # tokens and so memory are unknown
        (8, {"mini_batch_size": 128}),  # an update is one micro-batch
    ],
)
def test_what_ranks_exchange_stays_as_it_is(plan: Callable[..., Plan], gpus: int, actor: dict[str, Any]) -> None:
    assert not {f"actor.{WEIGHTS}", f"actor.{GRADIENTS}"} & chosen(plan("1.5B", gpus, H200, **ppo(**actor))).keys()


def test_with_reshard_after_forward_set_only_gradients_wait_for_the_end_of_an_update(plan: Callable[..., Plan]) -> None:
    values = chosen(plan("1.5B", 2, H200, **ppo(sharding={"reshard_after_forward": True})))
    assert (f"actor.{WEIGHTS}" in values, f"actor.{GRADIENTS}" in values) == (False, True)


@pytest.mark.parametrize(("model", "has_head"), [("0.5B", False), ("3B", False), ("7B", True), ("32B", True)])
def test_a_head_of_its_own_is_gathered_with_the_embedding_except_by_the_critic(
    models: Path, model: str, has_head: bool
) -> None:
    config = Config.model_validate({"model": {"path": models / model}})
    actor, critic = (size_of(config, role) for role in ("actor", "critic"))
    assert actor is not None
    assert critic is not None
    assert (actor.head, critic.head) == (actor.vocabulary * actor.hidden if has_head else 0, 0)
    more = gathered_bytes(actor, config.actor, 2, ranks=2) - gathered_bytes(critic, config.critic, 2, ranks=2)
    assert more == (2 + 4) * actor.head


@pytest.mark.parametrize(("split", "ranks"), [(1, 2), (2, 4)])
def test_gradients_that_add_up_on_each_rank_are_whole(models: Path, split: int, ranks: int) -> None:
    size = ModelSize.read(models / "7B")
    assert size is not None

    def gathered(interval: int, ranks: int) -> int:
        sharding = {"gradient_sync_interval": interval, "tensor_parallel": split}
        return gathered_bytes(size, Config.model_validate({"actor": {"sharding": sharding}}).actor, 2, ranks)

    layer = 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
    outside = 2 * 151_936 * 3584  # the embedding and the head, which are not split
    assert gathered(4, ranks) - gathered(1, ranks) == 4 * (28 * layer // split + outside)
    assert gathered(4, split) == gathered(1, split)  # nothing is averaged


def test_engines_on_gpus_of_their_own_get_the_same_cache_without_sleep(plan: Callable[..., Plan]) -> None:
    apart = {"actor": "0", "reference": "0", "rollout": "1"}
    asleep, awake = (
        chosen(plan("1.5B", 2, H100, **grpo(128, 1024, 15360, sleep=sleep), device_mapping=apart))
        for sleep in (True, False)
    )
    assert awake["rollout.kv_cache_gib"] == asleep["rollout.kv_cache_gib"] > 60


def test_on_different_gpus_a_role_gets_what_fits_the_smallest_of_its_own(plan: Callable[..., Plan]) -> None:
    sections = grpo(128, 1024, 15360)
    assert chosen(plan("7B", 4, H200, H100, **sections)) == chosen(plan("7B", 4, H100, H100, **sections))
    apart = {"actor": "node0:0,1,2,3", "reference": "node0:0,1,2,3", "rollout": "node1:0,1,2,3"}
    mixed, large = (chosen(plan("7B", 4, H200, engines, **sections, device_mapping=apart)) for engines in (H100, H200))
    assert mixed["rollout.kv_cache_gib"] < H100 < large["rollout.kv_cache_gib"]
    assert mixed["actor.micro_batch_tokens"] == large["actor.micro_batch_tokens"]


def test_nothing_is_chosen_if_a_node_does_not_tell_its_memory(plan: Callable[..., Plan]) -> None:
    planned = plan("7B", 4, H200, None)
    assert chosen(planned) == {}
    assert "nothing is chosen from the GPUs' memory, which 10.0.0.1 does not tell" in planned.lines()


def test_what_was_given_stays(plan: Callable[..., Plan]) -> None:
    planned = plan(
        "1.5B",
        1,
        H200,
        **GRPO,
        actor={"micro_batch_size": 4},
        rollout={"samples_per_prompt": 8, "max_num_seqs": 64, "gpu_memory_utilization": 0.5},
    )
    assert chosen(planned) == {}
    assert planned.config.actor.micro_batch_tokens is None


def test_nothing_is_chosen_on_cpu_or_for_models_of_another_kind(plan: Callable[..., Plan], models: Path) -> None:
    assert chosen(plan("0.5B", 1, 1000.0, device="cpu")) == {}
    config = models / "7B" / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("intermediate_size", "ffn_width"), encoding="utf-8")
    assert chosen(plan("7B", 8, H200)) == {}
    config.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "tokens", "resting_bytes", "measured_gib"),
    [
        ("1.5B", 8192, 16, 39.0),
        ("1.5B", 12288, 8, 32.3),  # optimizer states offloaded
        ("0.5B", 8192, 16, 15.8),
        ("0.5B", 32768, 16, 26.8),
    ],
)
def test_estimates_are_above_what_h200s_took_and_not_by_a_third(
    models: Path, model: str, tokens: int, resting_bytes: int, measured_gib: float
) -> None:
    """The peaks of updates of one GPU in benchmarks/measured/tables.md and benchmarks/measured/."""
    size = ModelSize.read(models / model)
    assert size is not None
    estimate = resting_bytes * size.parameters + pass_bytes(size, Config().actor, 2, ranks=1, tokens=tokens)
    assert measured_gib <= estimate / 2**30 <= 1.33 * measured_gib


@pytest.mark.parametrize(
    ("model", "row", "ranks", "measured_gib"),
    [
        ("7B", 65_536, 4, 85.3),
        ("7B", 65_536, 2, 137.8),
        ("7B", 32_768, 1, 125.5),
        ("1.5B", 32_768, 1, 52.1),
        ("1.5B", 32_768, 2, 33.2),
        ("1.5B", 32_768, 4, 21.0),
    ],
)
def test_estimates_of_long_rows_are_within_a_tenth_of_what_an_h200_took(
    models: Path, model: str, row: int, ranks: int, measured_gib: float
) -> None:
    """The peaks in benchmarks/measured/training.md of a rank of several, with weights and gradients in bfloat16."""
    size = ModelSize.read(models / model)
    assert size is not None
    estimate = 2 * 2 * size.parameters + pass_bytes(size, Config().actor, 2, ranks=1, tokens=row // ranks)
    assert estimate / 2**30 == pytest.approx(measured_gib, rel=0.1)


@given(
    st.sampled_from(sorted(SIZES)),
    st.sampled_from([1, 2, 8]),
    st.floats(20.0, 200.0),
    st.integers(16, 2048),
    st.integers(16, 32768),
    st.sampled_from(["gae", "grpo"]),
    st.booleans(),
)
def test_what_is_chosen_fits_whenever_the_longest_row_does(
    models: Path, name: str, gpus: int, gpu_gib: float, prompt: int, response: int, advantage: str, offload: bool
) -> None:
    sharding = {"sharding": {"optimizer_offload": offload, "param_offload": offload}}
    config = Config.model_validate(
        {
            "model": {"path": models / name},
            "data": {"max_prompt_length": prompt, "max_response_length": response},
            "algorithm": {"advantage": advantage},
            "actor": sharding,
            "critic": sharding,
        }
    )
    node = ClusterNode("id", "10.0.0.1", cpus=64, gpus=gpus, device_gib=gpu_gib)
    slots = [Slot(rank, node, "cuda", rank, gpus, group=None) for rank in range(gpus)]
    placement = place_roles(config, slots, roles_of(config))
    config, choices = with_choices(config, placement)
    keys = {choice.key for choice in choices}
    if "rollout.kv_cache_gib" in keys:
        check_fit([share for share in shares(config, placement) if share.role == "rollout"])
    for role in config.trained:
        section = config.critic if role == "critic" else config.actor
        if section.micro_batch_tokens is not None and section.micro_batch_tokens > prompt + response:
            concerned = [s for s in shares(config, placement) if s.role in (role, "reference")]
            assert tight(with_memory(concerned, FILLED * gpu_gib)) is None
