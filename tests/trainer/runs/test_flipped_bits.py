"""Bits that flip in the files that say something about a run or a checkpoint, one at a time."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from pydantic import TypeAdapter

from tests.fuzz.run_directory import whole_run
from trainer.config.tree import Config
from trainer.errors import TrainerError
from trainer.records.files import owner
from trainer.records.files.owner import RunOwner
from trainer.records.files.records import METRICS_ROWS, SAMPLE_ROWS, WAITS_ROWS, read_records
from trainer.records.files.run_files import read_settings
from trainer.records.tracking import Tracker
from trainer.runs.checkpoints.checkpoint import last_checkpoint
from trainer.runs.checkpoints.manifest import whole
from trainer.runs.reproduction.certificate import read_certificate

FLIPS = 1000
CHECKPOINT = Path("checkpoints") / "step_000002"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run(), tmp_path / "run"))


def flipped(file: Path, count: int = FLIPS) -> Iterator[str]:
    """The position of each bit, while it is flipped in the file."""
    content, random = file.read_bytes(), Random(file.name)
    for _ in range(count):
        at, bit = random.randrange(len(content)), random.randrange(8)
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        file.write_bytes(damaged)
        yield f"bit {bit} of byte {at}"
    file.write_bytes(content)


def read_twice(run: Path, file: Path, read: Callable[[Path], object]) -> Counter[str]:
    """How many flips a reader refuses, and how many change nothing of what it returns. Others are unnoticed."""
    whole_content = read(run)
    counts = Counter[str]()
    for place in flipped(run / file):
        try:
            same = read(run) == whole_content
        except TrainerError:
            counts["noticed"] += 1
        else:
            counts["harmless" if same else f"unnoticed: {place}"] += 1
    return counts


@pytest.mark.parametrize(
    ("file", "read"),
    [
        (CHECKPOINT / "state.json", lambda run: whole(run / CHECKPOINT)),
        (CHECKPOINT / "actor" / ".metadata", lambda run: whole(run / CHECKPOINT)),
        (Path("certificate.json"), read_certificate),
    ],
    ids=lambda given: given.name if isinstance(given, Path) else "",
)
def test_every_flipped_bit_of_what_a_resumed_run_believes_is_noticed(
    run: Path, file: Path, read: Callable[[Path], object]
) -> None:
    """Harmless is the case of a letter that JSON reads alike, as in 1e-06."""
    counts = read_twice(run, file, read)
    assert set(counts) <= {"noticed", "harmless"}
    assert counts["noticed"] >= FLIPS - 10


def test_every_flipped_bit_of_the_recorded_settings_is_refused_or_differs_from_the_certificate(run: Path) -> None:
    certified = read_certificate(run).settings
    counts = Counter[str]()
    for _ in flipped(run / "config.json"):
        try:
            counts["harmless" if read_settings(run) == certified else "noticed"] += 1
        except TrainerError:
            counts["noticed"] += 1
    assert counts["harmless"] <= 10


@pytest.mark.parametrize(
    ("name", "kind"),
    [("metrics.jsonl", METRICS_ROWS), ("samples.jsonl", SAMPLE_ROWS), ("waits.jsonl", WAITS_ROWS)],
)
def test_a_flipped_bit_of_a_record_costs_at_most_that_record(run: Path, name: str, kind: TypeAdapter[dict]) -> None:  # type: ignore[type-arg]
    """Most leave a line that is no record, and are named. Others change a number or a letter that is only shown: what a
    resumed run computes depends on no record."""
    before = read_records(run / name, kind, pytest.fail)
    counts = Counter[str]()
    for _ in flipped(run / name):
        notes: list[str] = []
        rows = read_records(run / name, kind, notes.append)
        lost = [row for row in before if row not in rows]
        assert len(lost) <= 2  # a line feed that went joins two lines
        counts["noticed" if notes or len(rows) < len(before) else "shown" if lost else "harmless"] += 1
    assert counts["noticed"] + counts["shown"] + counts["harmless"] == FLIPS
    assert counts["noticed"] > FLIPS / 4


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "waits.jsonl", "phase.json", "owner.json"])
def test_no_flipped_bit_of_a_record_keeps_a_run_from_going_on(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "SILENT_SECONDS", 0.0)  # else it waits for the heartbeat of the node that the bit names
    parts = {file: (run / file).read_bytes() for file in ("metrics.jsonl", "samples.jsonl", "waits.jsonl")}
    last_owner = (run / "owner.json").read_bytes()
    config = Config()
    for _ in flipped(run / name, count=100):
        damaged = (run / name).read_bytes()
        with RunOwner(run, watch=lambda _: None), Tracker(run, config, resumed_step=1) as tracker:
            tracker.begin()
            tracker.log(2, {"reward/mean": 1.0})
        rows = read_records(run / "metrics.jsonl", METRICS_ROWS, lambda _: None)
        assert rows[-1]["step"] == 2
        for file, content in parts.items():
            (run / file).write_bytes(content)
        (run / "owner.json").write_bytes(last_owner)
        (run / name).write_bytes(damaged)


def test_a_flipped_bit_of_the_newest_manifest_never_hides_it_in_silence(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run / "checkpoints" / "step_000002"
    for place in flipped(newest / "state.json", count=200):
        caplog.clear()
        try:
            chosen = last_checkpoint(run)
        except TrainerError:
            assert f"skipped a checkpoint: {newest}" in caplog.text, place
        else:
            assert chosen == newest, place
