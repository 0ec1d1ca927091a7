"""Damaged checkpoints: the newest of three is damaged, and `trainer.resume=auto` has to take the one before it."""

import logging
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from tests.chaos.injection import Injection, Kind
from tests.training_state import training_state
from trainer.records.files.checksums import sha256
from trainer.runs.checkpoints.checkpoint import CheckpointWriter, last_checkpoint

Damage = Callable[[Random, Path], None]
BYTES = 4096  # of a file of a rank


class Messages(logging.Handler):
    """What the trainer's loggers said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def inject(damage: Damage, random: Random, injection: Injection) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        run_dir = Path(directory) / "run"
        for step in (1, 2, 3):
            newest = write(run_dir, step, random)
        damage(random, newest)
        injection.moment = "after step 3"
        messages, began = Messages(), time.monotonic()
        logger = logging.getLogger("trainer")
        logger.addHandler(messages)
        try:
            last = last_checkpoint(run_dir)
        finally:
            logger.removeHandler(messages)
        injection.detected = round(time.monotonic() - began, 3)
        injection.readable, injection.steps_lost = last is not None, 3 - int(last.name[-6:]) if last else 3
        injection.expect(injection.steps_lost == 1, f"resumed from {last} although step 3 is damaged")
        injection.cause = next(
            (said for said in messages.said if re.search(r"step_000003.*damaged|not a check", said)), ""
        )
        injection.expect("\n" not in injection.cause, f"a message of several lines: {injection.cause}")
        write(run_dir, 3, random)  # as the resumed run does
        injection.files = sum(path.name.startswith(".") for path in (run_dir / "checkpoints").iterdir())
        injection.expect(last_checkpoint(run_dir) == newest, "the step written again is not whole")
    injection.expect_clean()


def write(run_dir: Path, step: int, random: Random) -> Path:
    """A checkpoint of two roles and two ranks."""
    run_dir.mkdir(exist_ok=True)
    writer = CheckpointWriter(run_dir)
    state = training_state(step)
    partial_directory, sums = writer.begin(state), {}
    for role in ("actor", "critic"):
        (partial_directory / role).mkdir()
        for rank in (0, 1):
            file = partial_directory / role / f"__{rank}_0.distcp"
            file.write_bytes(random.randbytes(BYTES))
            sums[f"{role}/{file.name}"] = sha256(file)
    return writer.complete(sums)


def files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def truncated(random: Random, checkpoint: Path) -> None:
    file = random.choice(files(checkpoint))
    content = file.read_bytes()
    file.write_bytes(content[: random.randrange(len(content) - 1)])


def zeroed(random: Random, checkpoint: Path) -> None:
    """From a random byte on, as a crash leaves a file whose size was written before its content."""
    file = random.choice(files(checkpoint))
    content = file.read_bytes()
    start = random.randrange(len(content) // 2)
    file.write_bytes(content[:start] + bytes(len(content) - start))


def changed(random: Random, checkpoint: Path) -> None:
    """One bit of a rank's file or of the manifest."""
    file = random.choice(files(checkpoint))
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def incomplete(random: Random, checkpoint: Path) -> None:
    """Some of its files were never written."""
    for file in random.sample(files(checkpoint), random.randint(1, 4)):
        file.unlink()


KINDS = tuple(
    Kind(f"checkpoint {damage.__name__}", partial(inject, damage))
    for damage in (truncated, zeroed, changed, incomplete)
)
