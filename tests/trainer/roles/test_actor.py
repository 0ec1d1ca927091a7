"""Updates of an actor with one rank, in which some responses or all of them do not train."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.cluster.place import RankPlace
from trainer.config.sections.watchdogs import WatchdogsConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.models.networks import PolicyNetwork
from trainer.roles.actor import ActorWorker
from trainer.runs.recovery.watchdogs import Watchdogs
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENS = {"policy_loss", "entropy", "clip_fraction", "approximate_kl"}


def actor() -> ActorWorker:
    """With two mini-batches of two responses in a step."""
    torch.manual_seed(0)
    size = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **size, **heads), dtype=torch.float32)
    settings = {"model": {"path": "/nowhere"}, "data": {"train_batch_size": 4}, "actor": {"mini_batch_size": 2}}
    worker = ActorWorker(
        Config.model_validate(settings | {"critic": {"mini_batch_size": 2}}), RankPlace(0, 1, "", "cpu")
    )
    optimizer = OptimizerSettings(learning_rate=1e-3, weight_decay=0.0, max_gradient_norm=1.0)
    worker.engine = TrainingEngine(PolicyNetwork(model, 1.0), Execution(torch.device("cpu"), torch.float32), optimizer)
    return worker


def step_of(trained: list[bool]) -> Batch:
    """Four responses of three tokens."""
    batch = Batch.from_responses([[1, 2]] * 4, [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]], None)
    zeros = torch.zeros(batch.response_mask.shape)
    batch = batch.with_(old_log_probs=zeros - 4.0, advantages=zeros + 1.0)
    return replace(batch, response_mask=batch.response_mask & torch.tensor(trained).unsqueeze(1))


def test_a_step_in_which_no_token_trains_measures_nothing_and_rings_no_watchdog() -> None:
    metrics = actor().update(step_of([False] * 4), [2, 2])
    assert metrics["actor/gradient_norm"] == 0.0
    assert not {f"actor/{name}" for name in TOKENS} & metrics.keys()
    watchdogs = Watchdogs(WatchdogsConfig.model_validate({"entropy": {"action": "stop", "threshold": 0.05}}))
    assert not watchdogs.look(metrics)


def test_a_mini_batch_in_which_no_token_trains_does_not_lower_the_means() -> None:
    whole, half = (actor().update(step_of(trained), [2, 2]) for trained in ([True] * 4, [False, False, True, True]))
    assert half["actor/entropy"] == pytest.approx(whole["actor/entropy"], rel=0.02)  # near log(50), not half of it
    assert half["actor/gradient_norm"] == pytest.approx(whole["actor/gradient_norm"] / 2, rel=0.5)
