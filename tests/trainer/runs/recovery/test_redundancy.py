"""A rank that dies is started again and continues from the copy that another process has in memory."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs.recovery import signalled_rank
from tests.trainer.whole_run import Runs
from tests.training_state import training_state
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import Config
from trainer.errors import LostRankError, MemoryFullError, WorkerError
from trainer.runs.ppo import PpoStep
from trainer.runs.recovery import redundancy
from trainer.runs.recovery.memory import MOST_RESTARTS, restarted
from trainer.runs.recovery.redundancy import Copies
from trainer.runs.workers import TrainingGroups

PROGRAM = Path(signalled_rank.__file__)


def test_a_run_whose_actor_rank_is_killed_in_an_update_ends_like_an_undisturbed_run(runs: Runs, tmp_path: Path) -> None:
    settings = ["rollout.engine=transformers", "data.max_response_length=16", "trainer.total_steps=4"]
    undisturbed = runs.start("nobody_dies", *settings)
    undisturbed.succeed()
    # The critic has taken the third step when a rank of the actor dies in it.
    killed = ["trainer.redundancy=1", "trainer.save_freq=0"]
    run = runs.start(
        "rank_dies", *settings, *killed, program=[str(PROGRAM), "SIGKILL", "1", "2", str(tmp_path / "killed")]
    )
    log = run.succeed()
    assert (tmp_path / "killed").exists()
    assert "died during update; the ranks of actor are started again" in log
    assert "actor continued from the copies of step 2 in memory after" in log
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["trainer/recoveries"] for row in rows[1:]] == [0, 0, 1, 0]
    assert rows[3]["time/recovery"] > 0
    for step in range(5):
        assert run.results(step) == undisturbed.results(step)
    samples = [compared.directory / "samples.jsonl" for compared in (undisturbed, run)]
    assert samples[0].read_text() == samples[1].read_text()
    before, after = (load_file(compared.directory / "model" / "model.safetensors") for compared in (undisturbed, run))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class FakeGroup:
    """A role with one rank, which may be lost. Also stands in for the keepers of its copies."""

    role, timeout, slots = "actor", 10.0, ()

    def __init__(self, lost: bool, events: list[str]) -> None:
        self._lost, self._events = lost, events

    def __len__(self) -> int:
        return 1

    def answer(self, _seconds: float) -> bool:
        return not self._lost

    def restart(self, _rank: int) -> None:
        self._events.append("restarted")

    def call(self, *_: object) -> list[object]:
        return []

    start = start_each = call


@pytest.mark.parametrize(
    ("lost", "error", "expected"),
    [
        (True, WorkerError("actor rank 0 died"), ["checkpoint abandoned", "restarted"]),
        (False, WorkerError("a row is too long"), []),
        (True, MemoryFullError("the GPU's memory is full", "lower it", None), []),
    ],
    ids=["a rank is lost", "no rank is lost", "no lower limit helps"],
)
def test_a_checkpoint_that_is_being_written_is_given_up_only_before_ranks_are_replaced(
    lost: bool, error: WorkerError, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    group: Any = FakeGroup(lost, events)
    monkeypatch.setattr(redundancy, "start_keepers", lambda *_: group)
    monkeypatch.setattr(redundancy, "links", lambda *_: [])
    monkeypatch.setattr(redundancy, "wait", lambda *_: [])
    monkeypatch.setattr(redundancy, "ray", SimpleNamespace(nodes=lambda: []))
    state = training_state(2)
    copies = Copies(TrainingGroups(group, critic=None, reference=None), lambda _: None, state)
    with nullcontext() if expected else pytest.raises(type(error), match=str(error)):
        assert copies.restore(error, lambda: events.append("checkpoint abandoned")) == state
    assert events == expected


def test_a_step_that_is_taken_again_after_its_weights_were_sent_is_as_old_as_before() -> None:
    """The staleness of a token counts updates, and that of the interrupted step is undone."""
    sent: list[int] = []
    engines, guard = SimpleNamespace(version=7, reconnect=sent.append), SimpleNamespace(snapshot=lambda: lambda: None)
    session: Any = SimpleNamespace(
        tracker=None,
        passes=None,
        last_step=9,
        efficiency=None,
        workers=SimpleNamespace(training=None, on_shared_gpus=False),
    )
    idle: Any = SimpleNamespace(paused=nullcontext)
    parts: tuple[Any, ...] = (None, engines, None, idle, guard, None)
    steps = PpoStep(Config(), session, *parts)
    go_back = steps.snapshot()
    engines.version += 1
    go_back()
    assert sent == [7]


def test_without_whole_copies_the_run_continues_from_its_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000004"
    starts = []

    def attempt(config: Config, _: object, again: bool) -> str:
        starts.append(config.trainer.resume)
        assert again == (len(starts) > 1)
        if len(starts) == 1:
            error = LostRankError("actor rank 1 died; its copy in memory cannot be used: the keeper died")
            error.checkpoint = checkpoint
            raise error
        return "done"

    assert restarted(Config(), tmp_path / "run", attempt) == "done"
    assert starts == [None, checkpoint]
    assert "its copy in memory cannot be used: the keeper died; the workers are restarted, and" in caplog.text
    assert f"the run continues from {checkpoint}" in caplog.text


def test_ranks_that_die_again_and_again_end_the_run(tmp_path: Path) -> None:
    starts = []

    def attempt(config: Config, _: object, again: bool) -> str:
        starts.append(config.trainer.resume)
        raise LostRankError("actor rank 1 died")

    with pytest.raises(LostRankError, match="died"):
        restarted(Config(), tmp_path / "run", attempt)
    assert len(starts) == MOST_RESTARTS + 1


def test_asynchronous_runs_cannot_repeat_a_step() -> None:
    with pytest.raises(ValueError, match=r"redundancy=1 does not work with mode=asynchronous.*set mode=one_step_off"):
        TrainerConfig(redundancy=1, mode="asynchronous")
