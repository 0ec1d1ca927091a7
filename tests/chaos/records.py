"""Damaged records: a line of a run's metrics, samples or waits is damaged, and the run has to go on and be shown."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from tests.chaos.checkpoints import Messages
from tests.chaos.injection import Injection, Kind
from tests.fuzz.run_directory import whole_run
from trainer.config.tree import Config
from trainer.records.files.records import METRICS, METRICS_ROWS, SAMPLES, WAITS, read_records
from trainer.records.pages.report import write_report
from trainer.records.tracking import Tracker

Damage = Callable[[Random, bytes], bytes]


def inject(damage: Damage, random: Random, injection: Injection) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        run_dir = Path(shutil.copytree(whole_run(), Path(directory) / "run"))
        file = run_dir / random.choice((METRICS, SAMPLES, WAITS))
        lines = file.read_bytes().splitlines(keepends=True)
        lines.insert(1, damage(random, lines[0]))
        file.write_bytes(b"".join(lines))
        injection.moment = f"in {file.name}"
        messages, began = Messages(), time.monotonic()
        logger = logging.getLogger("trainer")
        logger.addHandler(messages)
        try:
            write_report(run_dir)
            with Tracker(run_dir, Config(), resumed_step=1) as tracker:
                tracker.begin()
                tracker.log(2, {"reward/mean": 1.0})
        finally:
            logger.removeHandler(messages)
        injection.detected = round(time.monotonic() - began, 3)
        named = [said for said in messages.said if f"{file}: 1 line is no record and is left out: line 2" in said]
        injection.expect(
            len(named) == 2, f"named {len(named)} times, by the report and by the run that goes on: {named}"
        )
        injection.cause = named[0] if named else ""
        steps = [row["step"] for row in read_records(run_dir / METRICS, METRICS_ROWS, lambda _: None)]
        injection.expect(steps == [1, 2], f"recorded {steps}")
        injection.files = sum(path.name.startswith(".") for path in run_dir.iterdir())
    injection.expect_clean()


def torn(random: Random, line: bytes) -> bytes:
    """A part of a record, and another one behind it, as a full disk leaves them."""
    return line[: random.randrange(1, len(line) - 2)] + line


def zeros(random: Random, _line: bytes) -> bytes:
    """What a crash leaves where the size of a file was written before its content."""
    return bytes(random.randrange(1, 4096)) + b"\n"


def not_utf8(random: Random, line: bytes) -> bytes:
    content = bytearray(line)
    content[random.randrange(len(line) - 1)] = random.randrange(0x80, 0x100)
    return bytes(content)


def foreign(random: Random, _line: bytes) -> bytes:
    """A line that another program wrote."""
    return random.choice((b"hello\n", b'{"step": null}\n', b"[1, 2]\n", b'{"time": 1.5}\n', b"\n"))


KINDS = tuple(Kind(f"record {damage.__name__}", partial(inject, damage)) for damage in (torn, zeros, not_utf8, foreign))
