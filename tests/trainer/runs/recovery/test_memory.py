"""A run whose GPU memory is full, which a mock says on CPU, goes on with smaller micro-batches."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.trainer.runs.recovery import little_memory
from tests.trainer.whole_run import Run, Runs
from tests.training_state import training_state
from trainer.config.tree import Config
from trainer.data.arithmetic import write_arithmetic
from trainer.errors import LoweredLimit, MemoryFullError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.recovery.memory import MOST_RESTARTS, all_lowered, restarted, with_limits
from trainer.runs.reproduction.certificate import read_certificate
from trainer.runs.reproduction.replay import compare

PROGRAM = Path(little_memory.__file__)
SETTING, ROWS = "actor.micro_batch_tokens", "actor.micro_batch_size"
HALVED, HALVED_AGAIN = LoweredLimit(SETTING, 4096, 2048), LoweredLimit(SETTING, 2048, 1024)


class FullMemory:
    """Attempts of a run whose memory is full until `setting` is low enough."""

    def __init__(self, *errors: MemoryFullError) -> None:
        self.errors, self.configs, self.lowered = list(errors), list[Config](), list[Sequence[LoweredLimit]]()
        self.again = list[bool]()

    def __call__(self, config: Config, lowered: Sequence[LoweredLimit], again: bool) -> str:
        self.configs.append(config)
        self.lowered.append(tuple(lowered))
        self.again.append(again)
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def error(lowered: LoweredLimit | None, checkpoint: Path | None = None) -> MemoryFullError:
    made = MemoryFullError("the GPU's memory is full: mocked", "lower it", lowered)
    made.checkpoint = checkpoint
    return made


def test_a_run_continues_from_its_checkpoint_under_every_limit_that_was_lowered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000004"
    attempts = FullMemory(error(HALVED), error(HALVED_AGAIN, checkpoint))
    assert restarted(Config(), run_dir, attempts) == "done"
    assert attempts.lowered == [(), (HALVED,), (HALVED, HALVED_AGAIN)]
    assert attempts.again == [False, True, True]
    first, second, third = (config.trainer for config in attempts.configs)
    assert first.resume is None
    assert (second.output_dir, second.run_id, second.resume) == (tmp_path, "run", "auto")
    assert third.resume == checkpoint
    assert f"restarted with {SETTING}=2048 instead of 4096, and the run continues from its start" in caplog.text
    assert f"from {checkpoint}; results do not depend on it; to avoid the restart, set {SETTING}=1024" in caplog.text


def test_a_run_that_started_from_a_checkpoint_restarts_from_it(tmp_path: Path) -> None:
    config = Config.model_validate({"trainer": {"resume": tmp_path / "other" / "checkpoints" / "step_000004"}})
    attempts = FullMemory(error(HALVED))
    restarted(config, tmp_path / "run", attempts)
    assert attempts.configs[1].trainer.resume == config.trainer.resume


def test_a_run_that_only_validates_measures_the_same_checkpoint_again(tmp_path: Path) -> None:
    config = Config.model_validate({"trainer": {"run_id": "run", "resume": "auto", "validate_only": True}})
    attempts = FullMemory(error(HALVED))
    restarted(config, tmp_path / "run-validated", attempts)
    assert attempts.configs == [config, config]


def test_memory_that_a_smaller_micro_batch_cannot_free_ends_the_run(tmp_path: Path) -> None:
    attempts = FullMemory(error(None))
    with pytest.raises(MemoryFullError, match="memory is full"):
        restarted(Config(), tmp_path, attempts)
    assert len(attempts.configs) == 1


def test_too_many_restarts_end_the_run(tmp_path: Path) -> None:
    attempts = FullMemory(*(error(LoweredLimit(SETTING, 2**n, 2 ** (n - 1))) for n in range(20, 10, -1)))
    with pytest.raises(MemoryFullError, match="memory is full"):
        restarted(Config(), tmp_path, attempts)
    assert len(attempts.configs) == MOST_RESTARTS + 1


def test_a_resumed_run_starts_under_the_lowered_limit_unless_it_was_changed() -> None:
    def started(tokens: int) -> int | None:
        config = Config.model_validate({"actor": {"micro_batch_tokens": tokens}})
        return with_limits(config, [HALVED, HALVED_AGAIN]).actor.micro_batch_tokens

    assert started(4096) == 1024
    assert started(3000) == 3000


def test_a_limit_that_the_checkpoint_knows_counts_once() -> None:
    state = training_state(1, lowered=(HALVED,))
    assert TrainingState.model_validate_json(state.model_dump_json()) == state
    assert all_lowered(state, [HALVED, HALVED_AGAIN]) == [HALVED, HALVED_AGAIN]
    assert all_lowered(None, [HALVED]) == [HALVED]


THREE_STEPS = [
    *("algorithm.advantage=grpo", "algorithm.kl_coefficient=0", "rollout.engine=transformers"),
    *(f"{SETTING}=100000", "data.max_response_length=16", "trainer.total_steps=3"),
]


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Run:
    run = runs.start("enough_memory", *THREE_STEPS)
    run.succeed()
    return run


@pytest.mark.full
def test_ranks_with_mocked_full_memory_continue_from_copies_and_learn_the_same(runs: Runs, undisturbed: Run) -> None:
    copies = ["trainer.redundancy=1", "trainer.save_freq=0"]
    run = runs.start("copied_memory", *THREE_STEPS, *copies, program=[str(PROGRAM), "150", "2"])
    said = run.succeed()
    assert said.count(f"the ranks of actor are started again with {SETTING}=") == 1
    assert "actor continued from the copies of step 2 in memory after" in said
    rows = run.metrics()[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row.get("memory/lowered_limits", 0) for row in rows] == [0, 0, 1]
    assert_close(final_weights(run), final_weights(undisturbed), rtol=1e-4, atol=1e-5)


def test_ranks_with_mocked_full_memory_are_restarted_and_learn_the_same(runs: Runs, undisturbed: Run) -> None:
    # The update of the third step fails on one of two ranks. The other one waits for it.
    run = runs.start("little_memory", *THREE_STEPS, "trainer.save_freq=1", program=[str(PROGRAM), "150", "2"])
    said = run.succeed()
    assert said.count(f"the workers are restarted with {SETTING}=") == 1
    assert "instead of 100000, and the run continues from" in said
    rows = run.metrics()[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row.get("memory/lowered_limits", 0) for row in rows) == 1
    assert_close(final_weights(run), final_weights(undisturbed), rtol=1e-4, atol=1e-5)
    limits = state_of(run.directory / "checkpoints" / "step_000003")["lowered"]
    assert [(limit["setting"], limit["before"]) for limit in limits] == [(SETTING, 100_000)]
    ((limit,),) = read_certificate(run.directory).lowered.values()
    assert limit.startswith(f"{SETTING}=")


@pytest.mark.full
def test_a_step_of_reinforcement_learning_is_named_in_which_a_single_rank_repeated_a_pass(runs: Runs) -> None:
    run = runs.start("named_step", *THREE_STEPS, "trainer.nnodes=1", program=[str(PROGRAM), "150", "1"])
    assert "step 2: the GPU's memory was full, so a pass was taken again with" in run.succeed()
    assert [*read_certificate(run.directory).lowered] == [2]


@pytest.mark.full
def test_a_single_rank_with_mocked_full_memory_repeats_the_pass_and_learns_the_same(runs: Runs, tmp_path: Path) -> None:
    _, demonstrations, held_out = write_arithmetic(tmp_path, 64, 8, 9, dropped_carries=0.0, seed=0)
    settings = {
        **{"model.path": runs.model, "trainer.output_dir": runs.directory},
        **{"data.train_files": demonstrations, "data.validation_files": held_out, "data.train_batch_size": 8},
        **{"sft.response_key": "extra_info.answer", "sft.max_length": 128, "actor.micro_batch_size": 8},
        **{"trainer.nnodes": 1, "trainer.total_steps": 3, "trainer.test_freq": -1},
    }
    undisturbed = runs.launch("sft", "enough_memory_of_one", settings)
    undisturbed.succeed()
    run = runs.launch("sft", "little_memory_of_one", settings, program=[str(PROGRAM), "150", "1"])
    said = run.succeed()
    assert "step 2: the GPU's memory was full, so a pass was taken again with actor.micro_batch_size=4 " in said
    assert [row.get("memory/lowered_limits", 0) for row in run.metrics()[1:]] == [0, 2, 0]
    assert_close(final_weights(run), final_weights(undisturbed), rtol=1e-4, atol=1e-5)
    (checkpoint,) = (run.directory / "checkpoints").iterdir()
    assert [limit["after"] for limit in state_of(checkpoint)["lowered"]] == [4, 2]
    assert read_certificate(run.directory).lowered == {2: [f"{ROWS}=4 instead of 8", f"{ROWS}=2 instead of 4"]}

    # Bits are the same if memory is full in the same passes.
    runs.replay(run, program=[str(PROGRAM), "150", "1"])
    (first, *_) = compare(run.directory, read_certificate(run.directory), undisturbed.directory, 3).differences
    assert first == (
        f"step 2: limits that were lowered for lack of memory: {ROWS}=4 instead of 8 and {ROWS}=2 instead of 4 / none"
    )


def final_weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "model" / "model.safetensors")


def state_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())["state"]
