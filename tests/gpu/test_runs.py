"""Whole PPO runs on GPUs, with vLLM's kernels and every transport of weights between GPUs."""

from pathlib import Path

import pytest

from tests.gpu.whole_runs import COMMON, FAST, Finished, Machine, Record
from tests.trainer.runs.recovery import signalled_rank

pytestmark = pytest.mark.timeout(240)

# Largest mean |difference| between the engines' and the trainer's log-probs that bfloat16 rounding explains.
ROUNDING = 0.02


@pytest.fixture(scope="module")
def colocated(machine: Machine) -> Finished:
    """Engines with CUDA graphs, compiled layers, sleep and wake; a checkpoint after step 2."""
    return Finished.of(machine.runs.start("colocated", *COMMON, *FAST, "trainer.save_freq=2", *machine.on(1)))


def assert_engines_follow_the_actor(run: Finished) -> None:
    for row in run.steps:
        assert row["rollout/log_prob_difference_mean"] < ROUNDING
        assert row["rollout/repairs"] == 0
    # The actor is further from its starting point than the engines are from the actor.
    assert run.steps[0]["reference/kl"] == pytest.approx(0, abs=1e-3)
    for row in run.steps[1:]:
        assert abs(row["reference/kl"]) > 2 * row["rollout/log_prob_difference_mean"]


def test_on_one_gpu_engines_copy_every_update_of_the_actor(
    machine: Machine, colocated: Finished, record_property: Record
) -> None:
    colocated.note(record_property)
    assert f"weights go to the engines through {machine.transport_within_a_device}" in colocated.said
    assert_engines_follow_the_actor(colocated)


def test_a_resumed_run_repeats_the_next_step(machine: Machine, colocated: Finished, record_property: Record) -> None:
    checkpoint = colocated.directory / "checkpoints" / "step_000002"
    resumed = Finished.of(machine.runs.start("resumed", *COMMON, *FAST, f"trainer.resume={checkpoint}", *machine.on(1)))
    resumed.note(record_property)
    (again,), first = resumed.steps, colocated.steps[2]
    assert again["step"] == first["step"] == 3
    # Kernels may round differently in another process, so some responses diverge.
    for name in ("rollout/response_length", "reference/kl", "actor/entropy", "actor/gradient_norm"):
        assert again[name] == pytest.approx(first[name], rel=0.15, abs=1e-3), name
    assert again["rollout/log_prob_difference_mean"] < ROUNDING


@pytest.mark.timeout(400)
def test_a_deterministic_run_repeats_to_the_bit(machine: Machine, record_property: Record) -> None:
    """With sampling by vLLM, several micro-batches, and updates large enough that a changed bit would spread."""
    settings = (*COMMON, *FAST, "trainer.deterministic=true", "trainer.save_freq=1", "actor.micro_batch_tokens=256")
    started = machine.runs.start("exact", *settings, *machine.on(1))
    run = Finished.of(started)
    run.note(record_property)
    replayed = machine.runs.replay(started)
    assert [row["actor/gradient_norm"] for row in replayed.metrics() if row["step"] > 0] == [
        row["actor/gradient_norm"] for row in run.steps
    ]


def test_engines_with_weights_in_8_bits_follow_the_actor(machine: Machine, record_property: Record) -> None:
    """A quantised policy differs from the actor's by more than rounding, but by less than an update."""
    if machine.device == "cpu":
        pytest.skip("vLLM quantises on GPUs only")
    run = Finished.of(
        machine.runs.start(
            "quantised", *COMMON, *FAST, "rollout.quantization=fp8", "algorithm.correction=tis", *machine.on(1)
        )
    )
    run.note(record_property)
    for row in run.steps:
        assert 0 < row["rollout/log_prob_difference_mean"] < 0.1
        assert row["rollout/repairs"] == 0
    for row in run.steps[1:]:
        assert abs(row["reference/kl"]) > 2 * row["rollout/log_prob_difference_mean"]


def test_engines_that_draft_tokens_follow_the_actor(machine: Machine, record_property: Record) -> None:
    """At a low temperature, so that a random model repeats itself, for long enough that an engine tries it.

    The temperature divides logits, and so multiplies rounding.
    """
    settings = ("rollout.speculative_tokens=4", "rollout.temperature=0.2", "data.max_response_length=96")
    run = Finished.of(machine.runs.start("drafts", *COMMON, *FAST, *settings, *machine.on(1)))
    run.note(record_property)
    for row in run.steps:
        assert row["rollout/log_prob_difference_mean"] < 5 * ROUNDING
        assert row["rollout/repairs"] == 0
    assert any(row.get("engines/accepted_share", 0) > 0 for row in run.steps)


@pytest.mark.parametrize(("lora", "sent"), [("adapters", "adapters"), ("merged", "weights")])
def test_engines_sample_with_adapters(lora: str, sent: str, machine: Machine, record_property: Record) -> None:
    """An engine without them would be as far from the actor as the reference is."""
    run = Finished.of(
        machine.runs.start(
            lora,
            *COMMON,
            "actor.lora.rank=4",
            f"rollout.lora={lora}",
            "actor.learning_rate=1e-2",
            "algorithm.advantage=grpo",  # needs no critic, so the run is short
            *machine.on(1),
        )
    )
    run.note(record_property)
    assert f"{sent} go to the engines through {machine.transport_within_a_device}" in run.said
    assert_engines_follow_the_actor(run)


@pytest.mark.gpus(2)
def test_an_engine_over_two_gpus_copies_every_update_of_the_actor(machine: Machine, record_property: Record) -> None:
    """Each rank of the engine takes its part of the weights from the actor on its GPU, and both sleep and wake."""
    devices = machine.on(2) if machine.device == "cuda" else machine.on(1)  # on CPU, both ranks are on one node
    run = Finished.of(machine.runs.start("spanning", *COMMON, *FAST, "rollout.tensor_parallel=2", *devices))
    run.note(record_property)
    assert f"weights go to the engines through {machine.transport_within_a_device}" in run.said
    assert_engines_follow_the_actor(run)


def on_two_gpus(machine: Machine, name: str, *settings: str) -> Finished:
    """The second GPU belongs to the engine."""
    trained = [f"device_mapping.{role}={machine.first}" for role in ("actor", "critic", "reference")]
    mapping = [*trained, f"device_mapping.rollout={machine.second}"]
    return Finished.of(machine.runs.start(name, *COMMON, *mapping, *machine.on(2), *settings))


@pytest.mark.gpus(2)
def test_engines_on_another_gpu_get_every_update_through_nccl(machine: Machine, record_property: Record) -> None:
    """NCCL is the choice of `auto`."""
    run = on_two_gpus(machine, "apart", *FAST, "rollout.enforce_eager=true", "algorithm.advantage=grpo")
    run.note(record_property)
    assert f"weights go to the engines through {machine.transport_between_devices('auto')}" in run.said
    assert "did not reach" not in run.said  # no engine had to use another transport
    assert_engines_follow_the_actor(run)


@pytest.mark.gpus(2)
def test_one_step_off_engines_receive_a_broadcast(machine: Machine, record_property: Record) -> None:
    """Responses come from the previous weights, which are almost the same after such small steps."""
    run = on_two_gpus(
        machine,
        "one-step-off",
        "trainer.mode=one_step_off",
        "algorithm.correction=tis",
        "rollout.weight_transfer=broadcast",
        "actor.learning_rate=2e-6",
    )
    run.note(record_property)
    assert f"weights go to the engines through {machine.transport_between_devices('broadcast')}" in run.said
    assert "did not reach" not in run.said
    for row in run.steps:
        assert row["rollout/log_prob_difference_mean"] < 2 * ROUNDING
        assert row["rollout/corrected_fraction"] < 0.01
    assert [row["rollout/staleness_mean"] for row in run.steps] == [0, 1, 1]


@pytest.mark.gpus(2)
def test_two_gpus_with_fsdp_repeat_the_first_step_of_one(machine: Machine, record_property: Record) -> None:
    """Float32 and sampling by Transformers, whose results do not depend on the number of rows in a batch."""
    settings = (*COMMON, *FAST, "model.dtype=float32", "rollout.engine=transformers", "trainer.total_steps=2")
    single, double = (
        Finished.of(machine.runs.start(f"fsdp-{count}", *settings, *machine.on(count))) for count in (1, 2)
    )
    double.note(record_property)
    for row, other in zip(single.steps, double.steps, strict=True):
        # AdamW divides by the root of tiny squares, which magnifies the rounding of the first updates.
        near = 0.02 if row["step"] == 1 else 0.2
        for name in ("rollout/response_length", "actor/entropy", "actor/gradient_norm", "reference/kl"):
            assert row[name] == pytest.approx(other[name], rel=near, abs=2e-3), name
        assert other["rollout/log_prob_difference_mean"] < 1e-2


@pytest.mark.gpus(2)
def test_a_killed_rank_continues_from_its_copy_beside_another_gpu(
    machine: Machine, tmp_path: Path, record_property: Record
) -> None:
    """A rank kills itself in the third step's backward pass, while the other waits for it in a collective."""
    program = [str(Path(signalled_rank.__file__)), "SIGKILL", "1", "2", str(tmp_path / "killed")]
    settings = (*COMMON, *FAST, "trainer.redundancy=1", *machine.on(2))
    run = Finished.of(machine.runs.start("killed", *settings, program=program))
    run.note(record_property)
    assert "actor continued from the copies of step 2 in memory after" in run.said
    assert [row["step"] for row in run.steps] == [1, 2, 3]
    assert [row["trainer/recoveries"] for row in run.steps] == [0, 0, 1]
    record_property("seconds of the recovery", run.steps[2]["time/recovery"])
