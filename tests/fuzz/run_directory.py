"""Damaged directories of runs, and everything that reads one: the commands, and a run that continues in it."""

import atexit
import io
import json
import os
import shutil
import tempfile
import warnings
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.damage import octets, tree
from tests.sealing import with_seal
from tests.training_state import training_state
from trainer.errors import TrainerError

FILES = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "waits.jsonl",
    "phase.json",
    "owner.json",
    "certificate.json",
    "trajectories/step_000002.parquet",
    "validations/step_000002.parquet",
    "checkpoints/step_000002/state.json",
    "checkpoints/step_000002/actor/.metadata",
)
"""Those that say something about others."""
SEALED = ("certificate.json", "state.json")


@cache
def whole_run() -> Path:
    """A run of two steps with a record of each kind; removed when the process ends."""
    import torch
    import torch.distributed.checkpoint as distributed_checkpoint

    from trainer.config.sections.trainer import TrajectoriesConfig
    from trainer.config.tree import Config
    from trainer.records.files.owner import RunOwner
    from trainer.records.tracking import Sample, Tracker
    from trainer.records.trajectories import TrajectoryWriter
    from trainer.runs.checkpoints.checkpoint import CheckpointWriter
    from trainer.runs.reproduction.certificate import Hardware
    from trainer.runs.reproduction.writer import CertificateWriter

    parent = tempfile.mkdtemp(prefix="fuzz-run-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    run_dir = Path(parent) / "run"
    config = Config.model_validate({"trainer": {"output_dir": parent, "run_id": "run", "keep_checkpoints": 1}})
    certificate = CertificateWriter(run_dir, config, config, config)
    with RunOwner(run_dir), Tracker(run_dir, config) as tracker, certificate:
        tracker.begin()
        certificate.prepare(Hardware(nodes=1, engines=1, devices={"actor": ["x"]}), None)
        certificate.begin()
        for step in (1, 2):
            with tracker.phase("generate"):
                pass
            tracker.log_samples(step, [Sample("1 + 1?", "two\u2028", "2", 0.5)])
            tracker.log_waits(step, {"rollout": (1.0, "rollout rank 1 on b")})
            metrics = {"reward/mean": 0.5 * step, "validation/exact_match": 0.25, "time/step": 2.0, "mfu/actor": 0.5}
            tracker.log(step, metrics)
        row = {"data_source": "a", "prompt": "1 + 1?", "response": "two", "ground_truth": "2", "reward": 1.0}
        for folder in ("trajectories", "validations"):
            writer = TrajectoryWriter(run_dir / folder, TrajectoriesConfig())
            writer.write(2, lambda: [{**row, "scores": '{"format": 1.0}', "tokens": 1}])
            writer.close()
        checkpoints = CheckpointWriter(run_dir)
        partial = checkpoints.begin(training_state(2))
        state = {"network": {"weight": torch.ones(2)}}
        with warnings.catch_warnings(action="ignore"):  # torch warns that one process saves
            distributed_checkpoint.save(state, checkpoint_id=partial / "actor", no_dist=True)
        certificate.checkpoint(2, checkpoints.complete({}))
        shutil.copyfile(run_dir / "owner.json", run_dir.parent / "owner.json")
    shutil.move(run_dir.parent / "owner.json", run_dir / "owner.json")
    return run_dir


@dataclass(frozen=True)
class Damage:
    """What stands in place of a file: bytes, or something that is no regular file."""

    file: str
    content: bytes | str


@dataclass(frozen=True)
class DamagedRun:
    """One or two damaged files of a run, and whether its pages are written, which takes most of the time."""

    damages: list[Damage]
    pages: bool


def damaged(random: Random) -> DamagedRun:
    files = random.sample(FILES, random.choice((1, 1, 2)))
    return DamagedRun([_damage(random, file) for file in files], random.random() < 0.2)


def _damage(random: Random, file: str) -> Damage:
    before = (whole_run() / file).read_bytes()
    kind = random.randrange(10)
    if kind == 0:
        return Damage(file, random.choice(("nothing", "directory", "pipe", "device", "elsewhere", "loop")))
    if kind <= 2:
        start = random.randrange(len(before))
        return Damage(file, before[:start] + random.randbytes(random.randrange(8)) + before[start + 4 :])
    if kind <= 4 or file.endswith((".parquet", ".metadata")):
        flipped = bytearray(before)
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        return Damage(file, bytes(flipped))
    if kind <= 6:
        return Damage(file, octets(random, [before.decode()]))
    lines = before.decode().split("\n")[:-1] if file.endswith(".jsonl") else [before.decode()]
    trees = [tree(random, [json.loads(line)]) for line in lines]
    if file.endswith(SEALED) and isinstance(trees[0], dict):
        trees[0].pop("sha256", None)
        return Damage(file, with_seal(trees[0]).encode())
    return Damage(file, "".join(json.dumps(document) + "\n" for document in trees).encode())


def read_run_directory(given: DamagedRun) -> None:
    """Reads a damaged run by every door. Each may refuse it."""
    with tempfile.TemporaryDirectory() as directory, redirect_stderr(io.StringIO()):
        run_dir = Path(directory) / "run"
        shutil.copytree(whole_run(), run_dir)
        for damage in given.damages:
            _inflict(damage, run_dir / damage.file)
        pages = (_report, _compare) if given.pages else ()
        for read in (*pages, _read, _top, _samples, _verify, _export, _continue):
            with suppress(TrainerError):
                read(run_dir)


def _inflict(damage: Damage, file: Path) -> None:
    file.unlink()
    match damage.content:
        case bytes(content):
            file.write_bytes(content)
        case "directory":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "loop":
            file.symlink_to(file.name)
        case "elsewhere":
            file.symlink_to("/etc/hostname")


def _read(run_dir: Path) -> None:
    from trainer.records.files.run_files import read_run

    read_run(run_dir)


def _report(run_dir: Path) -> None:
    from trainer.records.pages.report import write_report

    write_report(run_dir)


def _compare(run_dir: Path) -> None:
    from trainer.records.pages.comparison import write_comparison

    whole = run_dir.with_name("whole")
    shutil.copytree(whole_run(), whole)
    write_comparison([run_dir, whole], run_dir.with_name("comparison.html"))


def _top(run_dir: Path) -> None:
    from rich.console import Console

    from trainer.records.top import watch

    watch(run_dir, Console(file=io.StringIO()))


def _samples(run_dir: Path) -> None:
    from trainer.records.files.run_files import recorded_trajectories
    from trainer.records.trajectories import show

    for validation in (False, True):
        with suppress(TrainerError):
            for row in recorded_trajectories(run_dir, None, validation):
                show(row).encode()


def _verify(run_dir: Path) -> None:
    from trainer.runs.reproduction.verify import verify

    verify(run_dir)


def _export(run_dir: Path) -> None:
    from trainer.runs.checkpoints.export import export_checkpoint

    export_checkpoint(run_dir, None, None, run_dir)


def _continue(run_dir: Path) -> None:
    """What a resumed run reads before its workers start, and writes."""
    from trainer.config.tree import Config
    from trainer.records.files.owner import RunOwner
    from trainer.records.tracking import Tracker
    from trainer.runs.checkpoints.checkpoint import read_resumed
    from trainer.runs.checkpoints.places import with_last_checkpoint
    from trainer.runs.reproduction.certificate import Hardware
    from trainer.runs.reproduction.writer import CertificateWriter

    settings = {"output_dir": run_dir.parent, "run_id": run_dir.name, "resume": "auto"}
    with RunOwner(run_dir, watch=lambda _: None):
        config = with_last_checkpoint(Config.model_validate({"trainer": settings}))
        state = read_resumed(config, ["actor"])
        with (
            Tracker(run_dir, config, -1 if state is None else state.step) as tracker,
            CertificateWriter(run_dir, config, config, config) as certificate,
        ):
            tracker.begin()
            certificate.prepare(Hardware(nodes=1, engines=1, devices={}), config.trainer.checkpoint)
            certificate.begin()
            with tracker.phase("generate"):
                tracker.log(3, {"reward/mean": 1.0})
