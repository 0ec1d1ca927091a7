"""verl's asynchronous trainers as ours."""

import pytest

from trainer.compat.settings import load_config
from trainer.config.tree import Config
from trainer.errors import ConfigError

ENGINES = "actor_rollout_ref.rollout"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=4",
    "data.train_batch_size=128",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
)


def of_verl(preset: str, *arguments: str) -> Config:
    return load_config([preset], ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", *arguments])[0]


def refusal(preset: str, *arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        of_verl(preset, *arguments)
    return caught.value


def test_colocated_engines_sample_ahead_on_the_trainers_gpus() -> None:
    config = of_verl("verl", "trainer.v1.trainer_mode=colocate_async", f"{ENGINES}.nnodes=1")
    assert (config.trainer.mode, config.trainer.max_staleness) == ("asynchronous", 1)
    assert config.device_mapping.rollout is None
    assert (config.algorithm.old_log_probs, config.algorithm.correction) == ("trainer", "none")  # as in verl
    deeper = of_verl("verl", "trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=3")
    assert deeper.trainer.max_staleness == 3


def test_the_order_of_responses_is_a_difference_that_is_noted() -> None:
    _, notes = load_config(["verl"], ["trainer.v1.trainer_mode=colocate_async"])
    assert "trainer.v1.trainer_mode=colocate_async: responses train in the order of their prompts" in notes[0]


def test_separate_engines_get_gpus_beside_the_trainers() -> None:
    config = of_verl(
        "verl",
        *SEPARATE,
        f"{ENGINES}.nnodes=1",
        f"{ENGINES}.n_gpus_per_node=4",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=4",
    )
    assert config.trainer.mode == "asynchronous"
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, 8)
    assert (config.device_mapping.actor, config.device_mapping.rollout) == ("node0:0,1,2,3", "node0:4,5,6,7")
    assert config.device_mapping.actor == config.device_mapping.critic == config.device_mapping.reference


def test_engines_that_do_not_fit_beside_the_trainers_get_nodes_of_their_own() -> None:
    config = of_verl(
        "verl_one_step_off",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=8",
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=2",
    )
    assert (config.trainer.mode, config.trainer.nnodes, config.trainer.n_gpus_per_node) == ("one_step_off", 3, 8)
    assert config.device_mapping.actor == "node0:0,1,2,3,4,5,6,7"
    assert config.device_mapping.rollout == "node1:0,1;node2:0,1"


def test_your_own_mapping_of_devices_counts() -> None:
    config = of_verl("verl_one_step_off", "device_mapping.rollout=node0:7", "trainer.n_gpus_per_node=8")
    assert (config.device_mapping.rollout, config.trainer.n_gpus_per_node) == ("node0:7", 8)


def test_a_step_of_separate_async_has_as_many_mini_batches_as_in_verl() -> None:
    words = refusal("verl", *SEPARATE, "data.train_batch_size=64")
    assert "4 mini-batches of 32 prompts are not data.train_batch_size=64" in str(words)


def test_the_older_trainer_is_synchronous_whatever_the_newer_ones_keys_say() -> None:
    config, notes = load_config(["verl"], ["trainer.use_v1=False", "trainer.v1.trainer_mode=separate_async"])
    assert (config.trainer.mode, notes) == ("synchronous", [])
    assert load_config(["verl"], ["trainer.v1.trainer_mode=sync"])[1] == []
    assert "is not supported here" in str(refusal("verl", "trainer.v1.trainer_mode=hybrid"))


def test_one_step_off_learns_from_the_engines_log_probs() -> None:
    config = of_verl("verl_one_step_off", "actor_rollout_ref.hybrid_engine=False")
    assert (config.algorithm.old_log_probs, config.algorithm.correction) == ("engine", "none")
    recomputed = of_verl("verl_one_step_off", "algorithm.rollout_correction.bypass_mode=False")
    assert (recomputed.algorithm.old_log_probs, recomputed.algorithm.correction) == ("trainer", "none")


FULLY = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=2",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
)


def test_a_step_is_what_fully_async_trains_between_two_transfers_of_weights() -> None:
    config = of_verl("verl_fully_async", *FULLY, "rollout.total_rollout_steps=2600", "rollout.test_freq=7")
    assert config.data.train_batch_size == 4 * 2 * 32
    assert config.actor.mini_batch_size == 32 * 8
    assert config.trainer.total_steps == 10  # 2600 prompts in batches of 256
    assert config.trainer.stop_after_epochs
    assert config.trainer.test_freq == 7
    assert (config.trainer.mode, config.algorithm.old_log_probs) == ("asynchronous", "engine")


def test_the_staleness_of_fully_async_is_a_share_of_a_step() -> None:
    assert of_verl("verl_fully_async", *FULLY).trainer.max_staleness == 0.1
    assert of_verl("verl_fully_async", *FULLY, "async_training.staleness_threshold=0.5").trainer.max_staleness == 0.5


def test_without_partial_rollout_responses_finish_under_their_first_weights() -> None:
    off = of_verl("verl_fully_async", *FULLY, "async_training.partial_rollout=False", "data.max_response_length=4096")
    assert off.rollout.segment_length == 4096
    assert of_verl("verl_fully_async", *FULLY).rollout.segment_length == 64


def test_recomputed_log_probs_are_corrected_as_asked() -> None:
    config = of_verl(
        "verl_fully_async",
        *FULLY,
        "async_training.compute_prox_log_prob=True",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
    )
    assert (config.algorithm.old_log_probs, config.algorithm.correction) == ("trainer", "tis")


def test_a_warm_up_of_updates_becomes_one_of_steps() -> None:
    arguments = [*FULLY, "actor_rollout_ref.actor.optim.lr_warmup_steps=10"]
    config, notes = load_config(["verl_fully_async"], arguments)
    schedule = config.actor.schedule
    assert (schedule.warmup_steps, schedule.zero_indexed) == (3, False)  # 4 updates a step
    assert any("the learning rate changes once per step of 4 updates" in note for note in notes)
    assert "1/4 of an asynchronous run" in str(
        refusal("verl_fully_async", *FULLY, "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
    )


def test_keys_of_fully_async_are_refused_elsewhere() -> None:
    assert "belongs to verl's fully_async_policy" in str(refusal("verl", "async_training.staleness_threshold=0.5"))
    assert "hybrid_engine=False is not supported here" in str(refusal("verl", "actor_rollout_ref.hybrid_engine=False"))


def test_partial_rollout_continues_responses_on_the_trainers_gpus() -> None:
    config = of_verl("verl_partial_rollout", "+async_training.partial_rollout=True")
    assert (config.trainer.mode, config.trainer.max_staleness) == ("asynchronous", 1)
    assert config.device_mapping.rollout is None


@pytest.mark.parametrize(("batches", "rounds"), [(0, None), (10, 10), (4, 12)])
def test_rounds_of_dynamic_sampling_are_counted_in_whole_batches(batches: int, rounds: int | None) -> None:
    drawn = 96 if rounds == 12 else 32
    config = of_verl(
        "verl_dapo",
        "algorithm.filter_groups.enable=True",
        f"algorithm.filter_groups.max_num_gen_batches={batches}",
        f"data.gen_batch_size={drawn}",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    )
    assert config.algorithm.max_sampling_rounds == rounds


def test_keys_of_the_gpus_of_engines_are_without_effect_in_synchronous_runs() -> None:
    _, notes = load_config(["verl"], [f"{ENGINES}.nnodes=1"])
    assert notes == [f"{ENGINES}.nnodes has no effect: engines and trainers share their GPUs"]
