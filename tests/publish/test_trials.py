"""Trials of an image on a machine: what the measurements show, and who may certify what."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buildkit.certification.certificate import Part
from buildkit.certification.certify import digests, try_parts
from buildkit.certification.judge import judge_devices, judge_training
from buildkit.certification.trials import Trial, devices, training
from buildkit.commands.certify import by_reason
from buildkit.errors import RunError, UsageError
from buildkit.host.machine import read_machine
from buildkit.images.test import wait_or_interrupt
from buildkit.recipe.matrix import load_matrix
from buildkit.running.short_run import count_gpus, refuse_other_variant
from tests.publish.conftest import ROOT
from tests.publish.test_commands import buildkit

MATRIX = load_matrix(ROOT)

# ---- what the measurements show --------------------------------------------------------------------------------------

H200 = {"host": "n", "device": "gpu 0", "name": "NVIDIA H200", "matrix": 760.0, "memory": 4200.0}
COPIES = {"to_device": 55.0, "to_host": 50.0, "between": 370.0}
SHEET = {"NVIDIA H200": {"matrix": 989.0, "memory": 4800.0, "link": 450.0}}


def measured(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"devices": list(devices), "data_sheets": SHEET, "slow": {}, "health": {}} | changes


def test_the_slowest_device_stands_beside_the_data_sheet() -> None:
    slower = H200 | COPIES | {"device": "gpu 1", "matrix": 700.0}
    speed, collectives = judge_devices(measured(H200 | COPIES, slower), gpus=True)
    assert (speed.result, collectives.result) == ("passed", "passed")
    assert speed.figures["matrix_tflops"] == 700
    assert speed.figures["data_sheet_matrix_tflops"] == 989
    assert collectives.figures == {"bus_gb_s": 370, "data_sheet_bus_gb_s": 450}


@pytest.mark.parametrize(
    ("report", "result", "words"),
    [
        (measured(H200 | COPIES, slow={"n": ["gpu 0: 400 TFLOP/s, of 989"]}), "failed", "of 989"),
        (measured(H200 | COPIES, health={"n": ["gpu 0: its clocks are lowered by heat"]}), "failed", "heat"),
        (measured(H200 | COPIES | {"name": "NVIDIA X1"}), "not done", "no data sheet of NVIDIA X1"),
    ],
)
def test_a_device_without_proof_does_not_pass(report: dict[str, Any], result: str, words: str) -> None:
    speed, collectives = judge_devices(report, gpus=True)
    assert speed.result == result
    assert words in speed.reason
    assert (collectives.result, collectives.reason) == ("not done", "the machine has a single device")


STEP = {
    "rollout/log_prob_difference_mean": 0.004,
    "rollout/log_prob_difference": 0.1,
    "rollout/synced_bytes": 2e6,
    "reference/kl": 0.8,
    "time/sync_weights": 0.1,
    "time/sleep": 0.05,
    "time/step": 2.0,
    "throughput/tokens_per_second": 500.0,
}


def trained(ranks: int = 2, gpus: bool = True, steps: int = 3, **changes: float) -> dict[str, Part]:
    """The parts of a run of three steps with these changes; the actor starts where the reference is."""
    step = STEP | {name.replace("__", "/"): value for name, value in changes.items()}
    rows = [step | {"reference/kl": 0.0}, step, step]
    return {part.name: part for part in judge_training(rows, steps, ranks, gpus)}


def test_a_run_in_which_the_engines_follow_the_actor_passes() -> None:
    assert {part.result for part in trained().values()} == {"passed"}


@pytest.mark.parametrize(
    ("change", "part", "words"),
    [
        ({"rollout__log_prob_difference_mean": 0.05}, "agreement", "differ by 0.05 nats"),
        ({"reference__kl": 0.007}, "weight sync", "as far from the actor"),
        ({"rollout__synced_bytes": 0.0}, "weight sync", "no weights were sent"),
    ],
)
def test_a_run_fails_the_part_that_it_contradicts(change: dict[str, float], part: str, words: str) -> None:
    parts = trained(**change)
    assert words in parts[part].reason
    assert [name for name, other in parts.items() if other.result == "failed"] == [part]


def test_engines_that_stayed_on_the_gpu_fail() -> None:
    awake = {name: value for name, value in STEP.items() if name != "time/sleep"}
    sleep = judge_training([awake] * 3, 3, 2, True)[-1]
    assert (sleep.name, sleep.result) == ("sleep and wake", "failed")


def test_what_a_machine_has_no_room_for_is_not_done() -> None:
    assert trained(ranks=1)["two ranks"].reason == "the machine has a single GPU; the run used it alone"
    assert trained(gpus=False)["sleep and wake"].result == "not done"


def test_a_run_that_ended_early_passes_nothing() -> None:
    assert {part.result for part in trained(steps=4).values()} == {"failed"}


class MockedMachine(Trial):
    """Records what would run, and leaves the metrics of a good run."""

    place = "/certify"

    def __init__(self, folder: Path, gpus: int, status: int = 0, total: float = 900) -> None:
        super().__init__(folder, gpus, total)
        self.status = status
        self.started: list[tuple[tuple[str, ...], int, int | None]] = []

    def run(self, command: tuple[str, ...], nodes: int = 1, gpus: int | None = None) -> int:
        self.started.append((command, nodes, gpus))
        (self.folder / "runs" / "ppo").mkdir(parents=True)
        rows = [{"step": 0}, STEP | {"step": 1, "reference/kl": 0.0}, STEP | {"step": 2}, STEP | {"step": 3}]
        (self.folder / "runs" / "ppo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.status


@pytest.mark.parametrize(
    ("gpus", "nodes", "used", "setting"),
    [
        (8, 1, 2, "trainer.n_gpus_per_node=2"),
        (1, 1, 1, "trainer.n_gpus_per_node=1"),
        (0, 2, None, "trainer.nnodes=2"),
    ],
)
def test_ppo_takes_two_ranks_where_there_is_room_with_a_mocked_machine(
    tmp_path: Path, gpus: int, nodes: int, used: int | None, setting: str
) -> None:
    machine = MockedMachine(tmp_path, gpus)
    two_ranks, *_ = training(machine)
    ((command, *where),) = machine.started
    assert where == [nodes, used]
    assert command[-1].endswith(setting)
    assert two_ranks.result == ("not done" if gpus == 1 else "passed")


@pytest.mark.parametrize(("status", "words"), [(124, "did not end within 480 s"), (17, "ended with status 17")])
def test_a_run_that_fails_fails_all_its_parts_with_a_mocked_machine(tmp_path: Path, status: int, words: str) -> None:
    parts = training(MockedMachine(tmp_path, 2, status))
    assert {part.result for part in parts} == {"failed"}
    assert words in parts[0].reason
    speed, _ = devices(MockedMachine(tmp_path / "other", 2, status))
    assert speed.result == "failed"
    assert speed.reason.startswith("`launch preflight --speed` ")


def test_the_run_gets_no_more_than_the_time_that_is_left_with_a_mocked_machine(tmp_path: Path) -> None:
    machine = MockedMachine(tmp_path, 2, 124, total=100)
    agreement = training(machine)[1]
    (command, *_) = machine.started[0]
    limit = int(command[command.index("timeout") + 1])
    assert 90 <= limit <= 100
    assert agreement == Part("agreement", "failed", f"the run did not end within {limit} s")


def test_a_step_that_comes_too_late_is_not_done_with_a_mocked_machine(tmp_path: Path) -> None:
    machine = MockedMachine(tmp_path, 2, total=10)
    parts = try_parts(machine, ("PPO", ("agreement", "weight sync"), lambda: training(machine)))
    assert machine.started == []
    assert [(part.name, part.result) for part in parts] == [("agreement", "not done"), ("weight sync", "not done")]
    assert "time" in parts[0].reason


def test_tests_that_hang_are_interrupted_and_clean_up() -> None:
    script = "import signal\ntry:\n print(1, flush=True)\n signal.pause()\nfinally:\n print(2, flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert wait_or_interrupt(process, 0.1) == 124
        assert process.stdout.readline() == b"2\n"


# ---- who may certify what --------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_certifies_no_gpu_target(tmp_path: Path) -> None:
    bare = read_machine(tmp_path)
    assert count_gpus(bare, MATRIX.variant("cpu"), "certify") == 0
    with pytest.raises(RunError, match="no NVIDIA GPU") as error:
        count_gpus(bare, MATRIX.variant("cuda"), "certify")
    assert "--target cpu" in error.value.hint


def test_an_image_of_another_variant_is_refused() -> None:
    labels = {"dev.slipway.target": "cpu", "dev.slipway.variant": "old", "dev.slipway.lock": "sha256:1"}
    with pytest.raises(UsageError, match="its labels say cpu, old"):
        refuse_other_variant(labels, MATRIX.variant("cuda"), "slipway:cuda")


def test_a_pulled_image_is_named_by_its_digests_in_registries_too() -> None:
    assert digests("sha256:1", ("ghcr.io/a/b@sha256:2", "c/d@sha256:2")) == ("sha256:1", "sha256:2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no signing method"),
        (["--key", "k", "--unsigned"], "exclude"),
        (["--unsigned", "--output", "/no/such/folder/file"], "no folder /no/such/folder"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments: list[str], words: str) -> None:
    done = buildkit("certify", "--target", "cpu", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_parts_that_failed_for_one_reason_are_named_together() -> None:
    parts = [
        Part("two ranks", "failed", "no answer"),
        Part("agreement", "failed", "no answer"),
        Part("x", "failed", "y"),
    ]
    assert by_reason(parts) == "two ranks, agreement: no answer; x: y"
