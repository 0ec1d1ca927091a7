"""Experts that ranks divide, compared with plain Transformers in one process."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.trainer.models import expert_program
from tests.trainer.models.expert_program import (
    CASES,
    DECAY,
    DENSE,
    EPSILON,
    FAMILIES,
    MOST_NORM,
    RATE,
    UPDATES,
    Case,
    Found,
    Model,
    rows,
)
from tests.trainer.models.test_log_probs_by_family import language_model, one_by_one
from tests.trainer.training.rank_program import loss
from tests.trainer.training.ranks import run_program
from trainer.algorithms.losses.aggregation import GlobalCount
from trainer.config.sections.roles import ActorConfig, LoraConfig
from trainer.config.sections.sharding import ShardingConfig
from trainer.errors import ConfigError, DataError
from trainer.models.experts import MOST_AT_ONCE, check_expert_parallel, divided, parts_needed, split_experts
from trainer.models.lora import adapted_layers, add_adapters
from trainer.training.ranks.reading import stored_tensors

ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    run_program(expert_program.__file__, made)
    return made


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[int, dict[str, Found]]:
    return {size: torch.load(directory / f"world_{size}.pt", weights_only=False) for size in CASES}


@cache
def plain(model: Model, biases_decay: bool) -> Found:
    """What `expert_program.found` returns, by Transformers' own forward pass on each row alone and by torch's AdamW."""
    network, batch = model.make(), rows()
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    decays = {name: biases_decay or not (name.endswith("bias") or weight.ndim == 1) for name, weight in trained.items()}
    groups = [{"params": [trained[name]], "weight_decay": DECAY * decays[name]} for name in trained]
    optimizer = torch.optim.AdamW(groups, RATE, eps=EPSILON)
    count = GlobalCount(int(batch.response_mask.sum()), len(batch))
    updates: list[dict[str, float]] = []
    result: Found = {}
    for _ in range(UPDATES):
        outputs = one_by_one(network, batch)
        value, metrics = loss(outputs, batch, count)
        optimizer.zero_grad()
        value.backward()
        of_rows = {name: float(metric.detach()) for name, metric in metrics.items()}
        result = result or {
            "log_probs": outputs[0].detach().clone(),
            "gradients": {name: weight.grad.clone() for name, weight in trained.items() if weight.grad is not None},
            "metrics": of_rows,
        }
        norm = nn.utils.clip_grad_norm_(trained.values(), MOST_NORM)
        updates.append({**of_rows, "gradient_norm": float(norm), "skipped": 0.0})
        optimizer.step()
    weights = {name: weight.detach() for name, weight in network.named_parameters() if ".lora_" not in name}
    weights |= {f"{name}.weight": layer.merged(lambda whole: whole.detach()) for name, layer in adapted_layers(network)}
    return {**result, "updates": updates, "weights": weights}


def apart(computed: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest relative differences."""
    numbers = [(computed["metrics"], expected["metrics"]), *zip(computed["updates"], expected["updates"], strict=True)]
    pairs = {
        "log-probs": [(computed["log_probs"], expected["log_probs"])],
        **{f"gradient of {name}": [(computed["gradients"][name], g)] for name, g in expected["gradients"].items()},
        **{f"trained {name}": [(computed["weights"][name], weight)] for name, weight in expected["weights"].items()},
    }
    return {
        **{
            name: max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-3) for a, b in numbers if name in b)
            for name in expected["updates"][0]
        },
        **{
            name: max(float((a - b).norm()) / max(float(b.norm()), 1e-3) for a, b in both)
            for name, both in pairs.items()
        },
    }


@pytest.mark.parametrize(("ranks", "case"), ALL, ids=lambda value: getattr(value, "name", str(value)))
def test_ranks_that_divide_experts_train_as_plain_transformers_does(
    results: dict[int, dict[str, Found]], ranks: int, case: Case
) -> None:
    computed, expected = results[ranks][case.name], plain(case.model, biases_decay=not case.fused)
    assert computed["gradients"].keys() == expected["gradients"].keys()
    assert computed["weights"].keys() == expected["weights"].keys()
    differences = apart(computed, expected)
    assert max(differences.values()) < 1e-5, max(differences.items(), key=lambda item: item[1])
    assert computed["gathered alike"]
    assert expected["log_probs"].abs().max() > 1


def test_a_checkpoint_fits_every_layout_bit_for_bit(directory: Path, results: dict[int, dict[str, Found]]) -> None:
    stored = {
        size: {name: tensor for part in stored_tensors(directory / f"of_{size}", "") for name, tensor in part.items()}
        for size in CASES
    }
    experts = [name for name in stored[1] if "experts" in name]
    assert {name.partition(".")[0] for name in experts} == {"network", "optimizer"}
    for size in (2, 4):
        assert stored[size].keys() == stored[1].keys()
        assert [name for name, tensor in stored[1].items() if not torch.equal(stored[size][name], tensor)] == []
        for name, weight in results[1]["resumed"].items():
            assert (results[size]["resumed"][name] - weight).norm() <= 1e-6 * weight.norm(), name


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_parts_hold_each_token_once_and_as_many_tokens_as_they_may(
    ranks: int, each: int, skew: int, random: Any
) -> None:
    loads = torch.tensor(
        [[[int(random.random() ** skew * 40) for _ in range(each)] for _ in range(ranks)] for _ in range(ranks)]
    )
    count = parts_needed(loads)
    parts = divided(loads, count)
    assert torch.equal(parts.sum(-1), loads)
    assert (parts >= 0).all()
    received = parts.sum(dim=(0, 2))  # [rank, part]
    assert received.max() <= MOST_AT_ONCE * loads.sum() / ranks + ranks
    assert (received.max(1).values - received.min(1).values <= ranks).all()


@pytest.mark.parametrize(
    ("family", "ranks", "reason", "hint"),
    [
        ("qwen3_moe", 3, "have 8 experts, which it does not divide", "one of 1, 2, 4, 8"),
        ("qwen3_moe", 16, "have 8 experts, which it does not divide", "one of 1, 2, 4, 8"),
        (DENSE, 2, "models have no experts that ranks can divide", "set it to 1"),
    ],
)
def test_models_whose_experts_ranks_cannot_divide_are_refused(family: str, ranks: int, reason: str, hint: str) -> None:
    with torch.device("meta"):
        model = language_model(family, FAMILIES.get(family, {}))
    with pytest.raises(DataError, match=rf"critic\.sharding\.expert_parallel={ranks}: {family}.*{reason}") as refused:
        check_expert_parallel(model, "critic", ranks)
    assert hint in str(refused.value.hint)
    check_expert_parallel(model, "critic", 1)


@pytest.mark.usefixtures("one_rank")
def test_experts_whose_matrices_do_not_divide_are_refused() -> None:
    decoder = language_model("qwen3_moe", FAMILIES["qwen3_moe"]).get_decoder()
    with pytest.raises(ConfigError, match="3 ranks share the same experts, which does not divide the size 32 of gate_"):
        split_experts(decoder, init_device_mesh("cpu", (1,)), 3)


def test_experts_take_no_adapters() -> None:
    model = language_model("qwen3_moe", FAMILIES["qwen3_moe"])
    with pytest.raises(ConfigError, match="has no linear layer gate_up_proj"):
        add_adapters(model, LoraConfig(rank=2, alpha=4, target_modules=["q_proj", "gate_up_proj"]), seed=0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sharding": {"tensor_parallel": 2}}, "does not support tensor_parallel=2: set tensor_parallel=1"),
        ({"sharding": {"reshard_after_forward": 2}}, "does not support reshard_after_forward=2: set that to true or"),
        ({"backend": "exact"}, "backend=exact does not support sharding.expert_parallel=2: leave it out"),
        ({"backend": "megatron"}, "backend=megatron does not support sharding.expert_parallel=2"),
    ],
)
def test_settings_that_cannot_divide_experts_are_refused(settings: dict[str, Any], reason: str) -> None:
    sharding = {"expert_parallel": 2, **settings.get("sharding", {})}
    with pytest.raises(ValidationError, match=reason):
        ActorConfig.model_validate(settings | {"sharding": sharding})
    ActorConfig.model_validate(settings | {"sharding": sharding | {"expert_parallel": 1}})


@pytest.mark.parametrize(("ranks", "shard_size", "sizes"), [(6, None, "1 or 2 or 3 or 6"), (16, 2, "1 or 2")])
def test_ranks_that_share_weights_divide_experts_evenly(ranks: int, shard_size: int | None, sizes: str) -> None:
    sharding = ShardingConfig(expert_parallel=4, shard_size=shard_size)
    with pytest.raises(
        ConfigError, match=rf"^actor\.sharding\.expert_parallel=4 does not divide the {shard_size or ranks} ra"
    ) as no:
        sharding.check_ranks("actor", "teacher", ranks)
    assert no.value.hint == f"set it to {sizes}"
    ShardingConfig(expert_parallel=2, shard_size=shard_size).check_ranks("actor", "teacher", ranks)
