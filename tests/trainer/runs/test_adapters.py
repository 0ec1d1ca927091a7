"""Adapters in a whole run, on two Ray nodes with real engines."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.trainer.whole_run import Runs, workers_of
from trainer.runs.checkpoints.export import export_checkpoint


def test_adapters_are_trained_against_the_frozen_actor_and_only_adapters_are_sent(runs: Runs) -> None:
    """A replaced engine gets the adapters too."""
    run = runs.start(
        "adapters",
        "actor.lora.rank=4",
        "rollout.lora=adapters",
        "critic.lora.rank=2",
        "critic.lora.target_modules=q_proj,v_proj",
        "actor.learning_rate=1e-2",
        "actor.sharding.shard_size=1",  # a copy of the weights on each node
        "trainer.total_steps=6",
    )
    run.wait_for_step(2)
    next(workers_of(runs, "RolloutWorker.call")).kill()
    assert "adapters go to the engines through Ray's object store, because there is no GPU" in run.succeed()
    rows = run.metrics()[1:]
    assert rows[0]["reference/kl"] == pytest.approx(0, abs=1e-6)
    # The engines sample with the adapters: without them they would be as far from the actor as the reference is.
    assert all(row["rollout/log_prob_difference"] < 1e-4 for row in rows)
    assert all(abs(row["reference/kl"]) > 1e-3 for row in rows[1:])
    assert all(row["actor/gradient_norm"] > 0 for row in rows)
    assert sum(row["rollout/repairs"] for row in rows) == 1
    # The only reward is minus the KL, which is 0 before the first step, so the critic's head learns nothing until then.
    assert rows[1]["critic/gradient_norm"] > 0
    exported = export_checkpoint(run.directory, None, None, None)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = load_file(exported / file), load_file(run.directory / "model" / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-6, rtol=0) for name in theirs)
    merged = AutoModelForCausalLM.from_pretrained(run.directory / "model").state_dict()
    frozen = AutoModelForCausalLM.from_pretrained(runs.model).state_dict()
    adapter = load_file(run.directory / "model" / "adapter" / "adapter_model.safetensors")
    assert {row["rollout/synced_bytes"] for row in rows} == {sum(part.nbytes for part in adapter.values())}
    settings = json.loads((run.directory / "model" / "adapter" / "adapter_config.json").read_text())
    name = "model.layers.0.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    product = settings["lora_alpha"] / settings["r"] * b @ a
    assert product.abs().max() > 1e-4
    assert_close(merged[f"{name}.weight"], frozen[f"{name}.weight"] + product, atol=1e-6, rtol=0)


@pytest.mark.full
def test_a_run_that_starts_from_an_adapter_is_measured_against_it(runs: Runs) -> None:
    """The adapter lacks a layer, which the second run leaves out as well."""
    light = ("trainer.nnodes=1", "algorithm.advantage=rloo", "rollout.engine=transformers")
    first = runs.start(
        "adapter",
        *light,
        "actor.lora.rank=4",
        "actor.lora.exclude_modules=[.*layers\\.0\\.mlp\\.down_proj]",
        "actor.learning_rate=1e-2",
        "trainer.total_steps=2",
    )
    first.succeed()
    assert abs(first.metrics()[-1]["reference/kl"]) > 1e-3
    adapter = first.directory / "model" / "adapter"
    settings = (f"actor.lora.path={adapter}", "actor.learning_rate=1e-2", "trainer.total_steps=2")
    second = runs.start("continued", *light, *settings)
    second.succeed()
    start, later = (row["reference/kl"] for row in second.metrics()[1:])
    assert start == pytest.approx(0, abs=1e-6)
    assert abs(later) > 1e-3
