"""What `trainer replay` refuses, where it writes, and what counts as a difference."""

import json
import shutil
from pathlib import Path

import pytest

from tests.trainer.runs.reproduction.conftest import HARDWARE, certify, edited, flip_last_byte, settings, write_inputs
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.runs.checkpoints.places import run_directory
from trainer.runs.reproduction.certificate import CERTIFICATE, read_certificate
from trainer.runs.reproduction.replay import compare, replay, settings_of
from trainer.runs.reproduction.writer import CertificateWriter, Repeat

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_replay_is_refused_with_every_reason(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = read_certificate(run).software.model_copy(update={"image": None, "code": "0" * 64, "python": "3.0"})
    edited(run, software=other.model_dump())
    flip_last_byte(tmp_path / "data.jsonl")
    with pytest.raises(ConfigError) as refused:
        replay(run)
    message = str(refused.value)
    assert "trainer: version" in message
    assert "python: 3.0 / " in message
    assert "data.jsonl changed (SHA-256)" in message
    assert not (tmp_path / "run-replay").exists()


def test_asynchronous_runs_and_unknown_steps_are_not_replayed(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights of step 7 are certified") as refused:
        replay(run, step=7)
    assert refused.value.hint == "--step is one of 1, 2"
    given = json.loads((run / CERTIFICATE).read_text())["given"]
    given["trainer"] |= {"mode": "asynchronous"}
    edited(run, given=given | {"algorithm": {"correction": "none"}})
    with pytest.raises(ConfigError, match="asynchronous: the timing of engines and learner"):
        replay(run)
    (tmp_path / "run-replay").mkdir()
    with pytest.raises(ConfigError, match="run-replay exists"):
        replay(run)


def test_a_replay_writes_nothing_where_the_run_wrote(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    folders = {"dir": tmp_path / "trajectories", "validation_dir": tmp_path / "validations", "freq": 2}
    config = settings(tmp_path, trajectories=folders, profiler={"dir": tmp_path / "traces"}, loggers=["wandb"])
    run = tmp_path / "run"
    run.mkdir()
    repeated = settings_of(Config, certify(run, config, steps=(1,)), run, tmp_path / "again").trainer
    assert run_directory(repeated) == tmp_path / "again"
    assert (repeated.trajectories.dir, repeated.trajectories.validation_dir, repeated.profiler.dir) == (None,) * 3
    assert repeated.trajectories.freq == 2
    assert repeated.total_steps == 4
    assert repeated.loggers == []


def test_a_replay_starts_from_a_checkpoint_in_the_run_s_own_directory_wherever_it_is_called(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = run / "checkpoints" / "step_000002"
    (run / CERTIFICATE).unlink()
    certificate = certify(run, settings(tmp_path), steps=(3,), checkpoint=start)
    assert certificate.origin is not None
    assert certificate.origin.path == "checkpoints/step_000002"
    monkeypatch.chdir(tmp_path)
    for directory in (run, Path("run")):
        assert settings_of(Config, certificate, directory, tmp_path / "again").trainer.resume == start


WHOLE = {"step": 2, "reward/mean": 0.5, "rollout/synced_bytes": 64.0, "validation/exact_match": 0.25, "time/step": 1.0}

CUT_OFF = {"step": 2, "reward/mean": 0.5, "trainer/interrupted": 1.0}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (WHOLE, []),
        (CUT_OFF, []),
        (CUT_OFF | {"rollout/synced_bytes": 64.0}, []),
        (CUT_OFF | {"rollout/synced_bytes": 32.0}, ["step 2: rollout/synced_bytes: 32.0 / 64.0"]),
        (CUT_OFF | {"reward/mean": 0.75}, ["step 2: reward/mean: 0.75 / 0.5"]),
        (CUT_OFF | {"watchdog/memory_growth": 1.0}, []),
        (CUT_OFF | {"watchdog/kl": 1.0}, ["step 2: watchdog/kl: 1.0 / None"]),
        ({"step": 2, "trainer/interrupted": 1.0, **WHOLE, "validation/exact_match": 0.5}, ["exact_match: 0.5 / 0.25"]),
        ({name: value for name, value in WHOLE.items() if "validation" not in name}, ["exact_match: None / 0.25"]),
    ],
)
def test_a_replay_misses_only_what_a_run_was_interrupted_before(
    run: Path, row: dict[str, float], expected: list[str]
) -> None:
    """A step that was interrupted after its update is not taken again: its row lacks what is measured later."""
    certificate, repeated = read_certificate(run), run.parent / "run-replay"
    shutil.copytree(run, repeated)
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (repeated / "metrics.jsonl").write_text(json.dumps(WHOLE) + "\n")
    for first, second in ((run, repeated), (repeated, run)):
        differences = compare(first, certificate, second, 2).differences
        assert len(differences) == len(expected)
    differences = compare(run, certificate, repeated, 2).differences
    assert all(line.endswith(end) for line, end in zip(differences, expected, strict=True))


def test_a_replay_on_other_hardware_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path)
    with CertificateWriter(tmp_path, config, config, config, Repeat(HARDWARE, 2)) as writer:
        assert writer.last_step(4) == 2
        with pytest.raises(ConfigError, match=r"computed on 1 nodes.*a CPU, 2 threads.*, this is 2 nodes"):
            writer.prepare(HARDWARE.model_copy(update={"nodes": 2}), None)
