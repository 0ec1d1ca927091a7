"""Where roles run: mappings, the plan, and models that do not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.planning.sizes import with_memory, write_sizes
from trainer.cluster.nodes import ClusterNode, Slot
from trainer.config.sections.device_mapping import parse_devices
from trainer.config.tree import Config
from trainer.errors import ConfigError, DataError
from trainer.models.small import ModelShape, build_tokenizer, create_model
from trainer.models.weight_files import parameter_count
from trainer.planning.memory import GRAPHS_GIB, PROCESS_GIB, Share, alternatives, check_fit, copies_gib, shares, table
from trainer.planning.placement import engine_slots, place_roles, roles_of
from trainer.runs.workers import rank_places


def slots(*gib: float | None) -> list[Slot]:
    """Two GPUs on each of two nodes, with this memory or that of each node."""
    nodes = [ClusterNode(f"id{at}", f"10.0.0.{at}", cpus=8, gpus=2, device_gib=gib[at % len(gib)]) for at in range(2)]
    return [Slot(rank, nodes[rank // 2], "cuda", rank % 2, 2, group=None) for rank in range(4)]


def on_cpu() -> list[Slot]:
    """A slot on each of two nodes without GPUs."""
    return [replace(slot, device="cpu") for slot in slots(None)[::2]]


SLOTS = slots(None)


def config(model: Path, **sections: Any) -> Config:
    return Config.model_validate({"model": {"path": model}, **sections})


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0", [(0, 0)]),
        ("0,1,2", [(0, 0), (0, 1), (0, 2)]),
        ("node0:0,1;node1:0,1", [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("node1:3; node0:2", [(1, 3), (0, 2)]),
    ],
)
def test_devices_are_written_by_node_and_number(text: str, devices: list[tuple[int, int]]) -> None:
    assert parse_devices(text) == devices


@given(st.text(alphabet="node:0123,; x", max_size=20))
def test_any_other_text_is_refused_or_has_one_device_per_number(text: str) -> None:
    try:
        devices = parse_devices(text)
    except ValueError:
        return
    assert len(devices) == text.count(",") + text.count(";") + 1


@pytest.mark.parametrize("text", ["", "node0", "0-3", "node0:0,0", "0;node0:0", "gpu0:1"])
def test_a_bad_mapping_is_refused_with_the_settings(text: str) -> None:
    with pytest.raises(ValueError, match="device"):
        Config.model_validate({"device_mapping": {"actor": text}})


def test_each_role_gets_its_devices_and_the_others_get_all(model: Path) -> None:
    settings = config(model, device_mapping={"actor": "node0:0,1", "critic": "node1:1;node0:1", "reward": "0"})
    placed = place_roles(settings, SLOTS, roles_of(settings))
    ranks = {role: [slot.rank for slot in slots] for role, slots in placed.items()}
    assert ranks == {
        "actor": [0, 1],
        "critic": [3, 1],
        "reward": [0],
        "reference": [0, 1, 2, 3],
        "rollout": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("text", ["node2:0", "node0:2"])
def test_a_missing_device_is_named_with_the_existing_ones(model: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place_roles(config(model, device_mapping={"critic": text}), SLOTS, ["critic"])
    assert f"device_mapping.critic={text}: there is no device" in str(caught.value)
    assert caught.value.hint == "devices of each node: node0 (10.0.0.0): 2, node1 (10.0.0.1): 2"


def test_batches_need_not_divide_by_ranks(model: Path) -> None:
    settings = config(model, actor={"mini_batch_size": 64}, critic={"mini_batch_size": 64})
    settings.check_ranks({"actor": 3, "critic": 128, "reference": 5, "teacher": 7})


def test_sizes_of_a_context_group_that_fit_are_named(model: Path) -> None:
    settings = config(model, actor={"sharding": {"context_parallel": 4, "tensor_parallel": 2}})
    settings.check_ranks({"actor": 8, "critic": 3, "reference": 16})
    with pytest.raises(
        ConfigError, match=r"^actor\.sharding\.context_parallel=4 does not divide the 12 ranks"
    ) as caught:
        settings.check_ranks({"actor": 12, "critic": 3})
    assert caught.value.hint == "set it to 1 or 2 or 3 or 6"
    with pytest.raises(ConfigError, match="the 4 ranks of the reference"):
        settings.check_ranks({"actor": 8, "critic": 3, "reference": 4})


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ({"shard_size": 3}, "shard_size=3 does not divide the 8 ranks of the actor"),
        ({"reshard_after_forward": 3}, "reshard_after_forward=3 is not a smaller divisor of the 8 ranks"),
        ({"shard_size": 4, "tensor_parallel": 3}, "tensor_parallel=3 does not divide the 4 ranks"),
        (
            {"shard_size": 4, "reshard_after_forward": 4},
            "reshard_after_forward=4 is not a smaller divisor of the 4 ranks",
        ),
    ],
)
def test_ranks_must_divide_as_the_sharding_says(model: Path, sharding: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=f"actor.sharding.{words}"):
        config(model, actor={"sharding": sharding}).check_ranks({"actor": 8, "critic": 8})


def test_offloaded_memory_counts_for_one_role_at_a_time(model: Path) -> None:
    offload = {"sharding": {"param_offload": True, "optimizer_offload": True}}

    def needed(**sections: Any) -> float:
        settings = config(model, rollout={"gpu_memory_utilization": 0.01}, **sections)
        needed = shares(settings, place_roles(settings, slots(1e-6), roles_of(settings)))
        for gib in range(1, 10000):
            try:
                check_fit(with_memory(needed, 4 * PROCESS_GIB + gib * 1e-5))
            except ConfigError:
                continue
            return gib * 1e-5
        raise AssertionError("never fits")

    slots_given = parameter_count(model) / 2**30 / len(SLOTS)
    everything, offloaded = needed(), needed(actor=offload, critic=offload)
    # Actor and critic have 12 bytes a weight, the reference 2. Engines copy whole weights of 2 bytes, 8 for each weight
    # of a share; an update takes 4 for gradients, and what was offloaded.
    assert everything == pytest.approx(34 * slots_given, abs=2e-5)
    assert offloaded == pytest.approx(18 * slots_given, abs=2e-5)
    assert needed(actor=offload, critic=offload, reference={"param_offload": True}) == pytest.approx(
        16 * slots_given, abs=2e-5
    )


def test_copies_take_what_a_checkpoint_has_on_each_node(model: Path) -> None:
    def gib(**sections: Any) -> float:
        settings = config(model, **sections)
        return copies_gib(settings, place_roles(settings, SLOTS, roles_of(settings)))

    nodes = len({slot.node.id for slot in SLOTS})
    # Actor and critic have a weight and Adam's two states in float32.
    assert gib(trainer={"redundancy": 1}) == pytest.approx(2 * 12 * parameter_count(model) / 2**30 / nodes)
    assert gib() == 0.0
    adapters = {"lora": {"rank": 8}}
    assert gib(trainer={"redundancy": 1}, actor=adapters, critic=adapters) == 0.0


def test_parameters_are_counted_from_the_headers(model: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    numbers = sum(weight.numel() for weight in create_model(tokenizer, ModelShape(), seed=0).parameters())
    assert parameter_count(model) == numbers
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(DataError, match="not a readable safetensors file"):
        parameter_count(tmp_path)


def test_the_plan_names_role_node_device_and_memory_and_refuses_models_that_do_not_fit(model: Path) -> None:
    settings = config(model, device_mapping={"reward": "node1:0"}, rollout={"gpu_memory_utilization": 0.5})
    placed = place_roles(settings, slots(8.0), roles_of(settings))
    needed = shares(settings, placed)
    lines = table(needed)
    assert lines[0].split()[:3] == ["role", "node", "device"]
    assert any(line.split() == ["rollout", "10.0.0.1", "cuda", "3", "0.80", "3.20"] for line in lines)
    assert sum(line.startswith("reward") for line in lines) == 1
    check_fit(needed)
    check_fit(with_memory(needed, None))
    with pytest.raises(ConfigError) as caught:
        check_fit(with_memory(needed, 4.0))
    assert "cuda 0 of 10.0.0.0 has 4.0 GiB" in str(caught.value)
    assert "rollout 4.0" in str(caught.value)
    assert "device_mapping" in caught.value.hint


def test_each_device_is_checked_against_the_memory_of_its_own_node(model: Path) -> None:
    def needed(**mapping: str) -> list[Share]:
        settings = config(model, rollout={"kv_cache_gib": 50.0}, device_mapping=mapping)
        return shares(settings, place_roles(settings, slots(80.0, 40.0), roles_of(settings)))

    check_fit(needed(rollout="node0:0,1"))
    for mapping in ({}, {"rollout": "node1:0,1"}):
        with pytest.raises(ConfigError, match=r"cuda 2 of 10\.0\.0\.1 has 40\.0 GiB"):
            check_fit(needed(**mapping))


@pytest.mark.parametrize(
    ("rollout", "gib"),
    [
        ({"kv_cache_gib": 70.0}, 4 * PROCESS_GIB + GRAPHS_GIB + 70),
        ({"kv_cache_gib": 70.0, "sleep": False}, 4 * PROCESS_GIB + GRAPHS_GIB + 70),
        ({"kv_cache_gib": 30.0, "engines_per_gpu": 2}, 5 * PROCESS_GIB + 2 * (GRAPHS_GIB + 30)),
        ({"gpu_memory_utilization": 0.9}, 3 * PROCESS_GIB + 72),  # a share of the GPU has all of its engine
    ],
)
def test_processes_and_the_graphs_of_engines_take_memory_of_their_gpu(
    model: Path, rollout: dict[str, Any], gib: float
) -> None:
    """With rewards by rule, which take none, and a model of a few MiB."""
    settings = config(model, rollout=rollout)
    needed = shares(settings, place_roles(settings, slots(80.0), roles_of(settings)))
    check_fit(with_memory(needed, gib + 0.1))
    with pytest.raises(ConfigError, match="each process takes an estimated") as caught:
        check_fit(with_memory(needed, gib - 0.1))
    assert f"{gib:.1f} that are needed" in str(caught.value)


def test_processes_take_nothing_of_a_device_on_cpu(model: Path) -> None:
    settings = config(model, rollout={"kv_cache_gib": 2.0})
    needed = shares(settings, place_roles(settings, on_cpu(), roles_of(settings)))
    with pytest.raises(ConfigError, match=r"less than the 2\.0 that are needed: rollout 2\.0, actor 0\.0, .*[0-9]$"):
        check_fit(with_memory(needed, 1.0))


@pytest.mark.parametrize(
    ("room", "hint"),
    [
        (45.0, "set rollout.gpu_memory_utilization=0.2: then"),
        (30.0, "critic.sharding.optimizer_offload=true: then"),
        (21.0, "critic.sharding.param_offload=true: then"),
        (18.5, "reference.param_offload=true: then"),
        (15.0, "use more devices"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_missing_memory_and_settings_that_help(
    tmp_path: Path, room: float, hint: str
) -> None:
    """`room` is the device's memory in bytes per weight of its share. Engines take two fifths of it, or a fifth,
    beside 1.7 bytes of weights that they copy; processes take 1.8."""
    model = write_sizes("7B", tmp_path / "model")
    settings = config(model)
    gib = room * parameter_count(model) / 2**30 / len(SLOTS)
    placed = place_roles(settings, slots(gib), roles_of(settings))
    with pytest.raises(ConfigError, match="less than the") as caught:
        check_fit(shares(settings, placed), alternatives(settings, placed))
    assert hint in caught.value.hint


def test_engines_with_a_cache_of_a_given_size_are_counted_one_by_one(model: Path) -> None:
    settings = config(model, rollout={"kv_cache_gib": 2.0, "engines_per_gpu": 3})
    needed = shares(settings, place_roles(settings, slots(140.0), ["rollout"]))
    assert needed[0].working == pytest.approx(3 * (GRAPHS_GIB + 2.0 + 2 * parameter_count(model) / 2**30))


def test_engines_that_span_gpus_stay_within_a_node(model: Path) -> None:
    def engines(placed_on: list[Slot], size: int, **mapping: str) -> list[list[int]]:
        settings = config(model, rollout={"tensor_parallel": size}, device_mapping=mapping)
        placed = place_roles(settings, placed_on, ["rollout"])
        return [[slot.rank for slot in engine] for engine in engine_slots(settings, placed["rollout"])]

    assert engines(SLOTS, 1) == [[0], [1], [2], [3]]
    assert engines(SLOTS, 2) == [[0, 1], [2, 3]]
    assert engines(SLOTS, 2, rollout="node1:0,1") == [[2, 3]]
    assert engines(SLOTS, 2, rollout="node1:0;node0:0,1;node1:1") == [[2, 3], [0, 1]]
    assert engines(on_cpu(), 2) == [[0, 0], [2, 2]]
    with pytest.raises(ConfigError, match=r"tensor_parallel=4 does not divide the 2 GPUs of .* on 10\.0\.0\.0"):
        engines(SLOTS, 4)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2 does not divide the 1 GPUs of .* on 10\.0\.0\.1"):
        engines(SLOTS, 2, rollout="node0:0,1;node1:0")


def test_engines_that_span_gpus_hold_a_part_of_the_model_on_each(model: Path) -> None:
    settings = config(model, rollout={"kv_cache_gib": 2.0, "tensor_parallel": 2})
    needed = shares(settings, place_roles(settings, slots(140.0), ["rollout"]))
    assert needed[0].working == pytest.approx(GRAPHS_GIB + 2.0 + 2 * parameter_count(model) / 2**30 / 2)


def test_a_rank_counts_the_workers_of_its_role_on_its_own_node() -> None:
    places = rank_places([SLOTS[0], SLOTS[1], SLOTS[3]])
    assert [(place.rank, place.world_size, place.local_rank, place.local_size) for place in places] == [
        (0, 3, 0, 2),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
    ]
