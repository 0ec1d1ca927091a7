"""Whole runs of PPO on GPUs, with vLLM's kernels and every way that weights take between GPUs."""

import pytest

from tests.gpu.whole_runs import COMMON, FAST, Finished, Machine, Record

pytestmark = pytest.mark.timeout(240)

# Mean |difference| of the engines' and the trainer's log-probs: rounding in bfloat16.
ROUNDING = 0.02


@pytest.fixture(scope="module")
def colocated(machine: Machine) -> Finished:
    """Engines with CUDA graphs, compiled layers, sleep and wake; a checkpoint after step 2."""
    return Finished.of(machine.runs.start("colocated", *COMMON, *FAST, "trainer.save_freq=2", *machine.on(1)))


def assert_engines_follow_the_actor(run: Finished) -> None:
    for row in run.steps:
        assert row["rollout/log_prob_difference_mean"] < ROUNDING
        assert row["rollout/repairs"] == 0
    # The actor has moved away from where it started, further than the engines are from it.
    assert run.steps[0]["reference/kl"] == pytest.approx(0, abs=1e-3)
    for row in run.steps[1:]:
        assert abs(row["reference/kl"]) > 2 * row["rollout/log_prob_difference_mean"]


def test_on_one_gpu_engines_copy_the_actors_weights_and_follow_it(
    machine: Machine, colocated: Finished, record_property: Record
) -> None:
    colocated.note(record_property)
    assert f"weights go to the engines through {machine.way_within_a_device}" in colocated.said
    assert_engines_follow_the_actor(colocated)


def test_a_run_from_a_checkpoint_makes_the_next_step_again(
    machine: Machine, colocated: Finished, record_property: Record
) -> None:
    checkpoint = colocated.directory / "checkpoints" / "step_000002"
    resumed = Finished.of(machine.runs.start("resumed", *COMMON, *FAST, f"trainer.resume={checkpoint}", *machine.on(1)))
    resumed.note(record_property)
    (again,), first = resumed.steps, colocated.steps[2]
    assert again["step"] == first["step"] == 3
    # Kernels may round otherwise in a process of its own, after which some responses go another way.
    for name in ("rollout/response_length", "reference/kl", "actor/entropy", "actor/gradient_norm"):
        assert again[name] == pytest.approx(first[name], rel=0.15, abs=1e-3), name
    assert again["rollout/log_prob_difference_mean"] < ROUNDING


def test_adapters_go_into_vllm_s_own_kernels(machine: Machine, record_property: Record) -> None:
    """They alone are trained and sent. Without them an engine would be as far from the actor as the reference is."""
    run = Finished.of(
        machine.runs.start(
            "adapters",
            *COMMON,
            "actor.lora.rank=4",
            "actor.learning_rate=1e-2",
            "algorithm.advantage=grpo",  # no critic to wait for
            *machine.on(1),
        )
    )
    run.note(record_property)
    assert f"adapters go to the engines through {machine.way_within_a_device}" in run.said
    assert_engines_follow_the_actor(run)


def on_two_gpus(machine: Machine, name: str, *settings: str) -> Finished:
    """The engine has the second GPU to itself."""
    trained = [f"device_mapping.{role}={machine.first}" for role in ("actor", "critic", "reference")]
    mapping = [*trained, f"device_mapping.rollout={machine.second}"]
    return Finished.of(machine.runs.start(name, *COMMON, *mapping, *machine.on(2), *settings))


@pytest.mark.gpus(2)
def test_from_gpu_to_gpu_engines_get_every_update_by_nccl(machine: Machine, record_property: Record) -> None:
    """It is what `auto` takes."""
    run = on_two_gpus(machine, "apart", *FAST, "rollout.enforce_eager=true", "algorithm.advantage=grpo")
    run.note(record_property)
    assert f"weights go to the engines through {machine.way_between_devices('auto')}" in run.said
    assert "did not reach" not in run.said  # no engine had to take another way
    assert_engines_follow_the_actor(run)


@pytest.mark.gpus(2)
def test_engines_that_sample_one_step_off_get_a_broadcast(machine: Machine, record_property: Record) -> None:
    """What they sampled is of the weights before the newest: with steps this small they are all but the same."""
    run = on_two_gpus(
        machine,
        "one-step-off",
        "trainer.mode=one_step_off",
        "algorithm.correction=tis",
        "rollout.weight_transfer=broadcast",
        "actor.learning_rate=2e-6",
    )
    run.note(record_property)
    assert f"weights go to the engines through {machine.way_between_devices('broadcast')}" in run.said
    assert "did not reach" not in run.said
    for row in run.steps:
        assert row["rollout/log_prob_difference_mean"] < 2 * ROUNDING
        assert row["rollout/corrected_fraction"] < 0.01
    assert [row["rollout/staleness_mean"] for row in run.steps] == [0, 1, 1]


@pytest.mark.gpus(2)
def test_two_gpus_with_fsdp_make_the_first_step_of_one(machine: Machine, record_property: Record) -> None:
    """In float32 and with Transformers' sampling, whose numbers do not depend on how many rows are beside a row."""
    settings = (*COMMON, *FAST, "model.dtype=float32", "rollout.engine=transformers", "trainer.total_steps=2")
    one, two = (Finished.of(machine.runs.start(f"fsdp-{count}", *settings, *machine.on(count))) for count in (1, 2))
    two.note(record_property)
    for row, other in zip(one.steps, two.steps, strict=True):
        # AdamW divides by the root of tiny squares, which enlarges what the first updates round.
        near = 0.02 if row["step"] == 1 else 0.2
        for name in ("rollout/response_length", "actor/entropy", "actor/gradient_norm", "reference/kl"):
            assert row[name] == pytest.approx(other[name], rel=near, abs=2e-3), name
        assert other["rollout/log_prob_difference_mean"] < 1e-2
