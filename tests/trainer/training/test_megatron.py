"""Megatron-Core's layers compared with Transformers': results, weight names, checkpoints and a whole run."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig

from tests.trainer.training import megatron_program
from tests.trainer.training.rank_program import ROWS
from tests.trainer.whole_run import Runs
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.models.files import check_models
from trainer.models.megatron_weights import origins, to_megatron, to_transformers

PROGRAM = Path(megatron_program.__file__)
HEADS = megatron_program.HEADS
CASES = [(ranks, *case) for ranks, cases in megatron_program.CASES.items() for case in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Results of one, two and four ranks."""
    directory = tmp_path_factory.mktemp("megatron")
    path = os.pathsep.join([str(PROGRAM.parents[3]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, PROGRAM, directory], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=280
    )
    return {ranks: torch.load(directory / f"world_{ranks}.pt", weights_only=False) for ranks in megatron_program.CASES}


def assert_all_close(tensors: dict[str, Tensor], wanted: dict[str, Tensor], atol: float) -> None:
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_close(tensors[name], tensor, atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("ranks", "family", "split"), CASES)
def test_log_probs_values_and_gradients_match_transformers_layers(
    results: dict[int, Any], ranks: int, family: str, split: int, role: str
) -> None:
    split_results, plain = results[ranks][family, split, "megatron"][role], results[1][family, 1, "fsdp"][role]
    assert_close(split_results["outputs"], plain["outputs"][: ROWS * split // ranks], atol=1e-5, rtol=0)
    assert_all_close(split_results["gradients"], plain["gradients"], atol=1e-6)
    assert split_results["step"] == pytest.approx(plain["step"], abs=1e-5)  # includes the gradient norm over all ranks


@pytest.mark.parametrize(("ranks", "family", "split"), CASES)
def test_weights_keep_transformers_names_and_get_the_same_updates(
    results: dict[int, Any], ranks: int, family: str, split: int
) -> None:
    split_results, plain = results[ranks][family, split, "megatron"], results[1][family, 1, "fsdp"]
    assert_all_close(split_results["before"], plain["before"], atol=0)
    # Adam divides by the root of tiny squares, which magnifies rounding; the bound is a fraction of the learning rate.
    assert_all_close(split_results["after"], plain["after"], atol=1e-3)
    assert all(
        not torch.equal(split_results["after"][name], weight) for name, weight in split_results["before"].items()
    )


def test_checkpointed_activations_and_a_frozen_reference_change_no_result(results: dict[int, Any]) -> None:
    plain = results[1][HEADS, 1, "megatron"]["actor"]
    assert_all_close(results[1]["checkpointed"]["gradients"], plain["gradients"], atol=1e-7)
    assert torch.equal(results[1]["frozen"], plain["outputs"])


def test_a_checkpoint_continues_exactly_on_any_number_of_ranks(results: dict[int, Any]) -> None:
    steps, weights = results[1]["next"]
    assert results[1]["repeated"][0] == steps
    assert_all_close(results[1]["repeated"][1], weights, atol=0)
    for (others, other_weights), (steps, weights) in (
        (results[2]["next"], results[1]["next"]),
        (results[4]["next of split"], results[2]["next of split"]),
    ):
        for other, step in zip(others, steps, strict=True):
            assert other == pytest.approx(step, abs=1e-5)
        assert_all_close(other_weights, weights, atol=1e-3)


def test_a_checkpoint_of_another_backend_or_split_is_refused(results: dict[int, Any]) -> None:
    assert "it was saved with another training backend" in results[1]["fsdp refuses"]
    assert "it was saved with another training backend" in results[1]["megatron refuses"]
    assert "it was saved with sharding.tensor_parallel=1: set that again" in results[2]["split refuses"]


def test_a_layer_with_weights_unknown_to_megatron_is_refused(results: dict[int, Any]) -> None:
    assert "differ from Megatron's in self_attention.linear_proj.bias" in results[1]["more biases"]


def test_projections_are_joined_by_group_and_mlp_weights_by_rank() -> None:
    """Four heads of width 1 in two groups, an MLP of width 4 on two ranks; each row has its own number."""
    config = AutoConfig.for_model("qwen2", num_attention_heads=4, num_key_value_heads=2)
    table = origins(config, ranks=2)
    rows = {"self_attn.q_proj": [0, 1, 2, 3], "self_attn.k_proj": [10, 11], "self_attn.v_proj": [20, 21]}
    rows |= {"mlp.gate_proj": [0, 1, 2, 3], "mlp.up_proj": [10, 11, 12, 13]}
    weights = {f"{name}.weight": torch.tensor(numbers).unsqueeze(1) for name, numbers in rows.items()}
    joined = to_megatron(weights, table)
    assert {name: weight.flatten().tolist() for name, (weight, _) in joined.items()} == {
        "self_attention.linear_qkv.weight": [0, 1, 10, 20, 2, 3, 11, 21],
        "mlp.linear_fc1.weight": [0, 1, 10, 11, 2, 3, 12, 13],
    }
    back = itertools.chain.from_iterable(
        to_transformers(f"layers.3.megatron.{name}", weight, table) for name, (weight, _) in joined.items()
    )
    assert {name: weight.tolist() for name, weight in back} == {
        f"layers.3.{name}": weight.tolist() for name, weight in weights.items()
    }


def test_a_missing_package_is_reported_with_the_fix_here_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "model_type": "qwen2"}')
    config = Config.model_validate({"model": {"path": tmp_path}, "critic": {"backend": "megatron"}})
    check_models(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"critic\.backend=megatron: megatron-core is not installed") as caught:
        check_models(config)
    assert "pip install 'megatron-core" in caught.value.hint


def test_a_model_of_another_family_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "model_type": "gemma3_text"}')
    config = Config.model_validate({"model": {"path": tmp_path}, "actor": {"backend": "megatron"}})
    with pytest.raises(ConfigError, match=r"actor\.backend=megatron does not support gemma3_text models"):
        check_models(config)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_adapters_are_refused_before_anything_starts(tmp_path: Path, role: str) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "model_type": "qwen2"}')
    settings = {"backend": "megatron", "lora": {"rank": 4}}
    with pytest.raises(ConfigError, match=rf"{role}\.backend=megatron does not support adapters"):
        check_models(Config.model_validate({"model": {"path": tmp_path}, role: settings}))


def test_a_whole_run_with_actor_critic_and_reference_on_megatron(runs: Runs) -> None:
    """Actor and reference are split over both nodes. Few processes keep the start short."""
    run = runs.start(
        "megatron",
        "actor.backend=megatron",
        "actor.sharding.tensor_parallel=2",
        "critic.backend=megatron",
        "device_mapping.critic=node0:0",
        "device_mapping.rollout=node1:0",
        "device_mapping.reward=node0:0",
        "trainer.total_steps=2",
        "rollout.engine=transformers",
    )
    run.succeed()
    for row in run.metrics()[1:]:
        assert row["rollout/log_prob_difference"] < 1e-3  # the engines received the weights by Transformers' names
        assert row["actor/gradient_norm"] > 0
    assert run.metrics()[2]["critic/gradient_norm"] > 0  # in step 1 there is neither a reward nor a KL to learn
    assert run.metrics()[1]["reference/kl"] == pytest.approx(0, abs=1e-6)
    assert abs(run.metrics()[2]["reference/kl"]) > 1e-6
    assert (run.directory / "model" / "model.safetensors").is_file()
