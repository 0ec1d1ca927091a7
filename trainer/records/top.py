"""Shows a run live, from the files in its directory: state, phases of the last step, metrics, GPUs."""

import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from trainer.errors import DataError
from trainer.records.files.owner import OWNER, SILENT_SECONDS
from trainer.records.files.records import CONFIG, METRICS, PHASE, Seconds
from trainer.records.files.regular import read_regular
from trainer.records.files.run_files import RecordedRun, median, read_run
from trainer.records.printable import printable
from trainer.records.waits import noticed


class _Phase(TypedDict, total=False):
    phase: str
    since: Seconds
    total_steps: int


class _Owner(TypedDict, total=False):
    pid: int
    host: str


Document = TypeVar("Document", _Phase, _Owner)
_PHASE, _OWNER = TypeAdapter(_Phase), TypeAdapter(_Owner)
_MOST_BYTES = 2**16  # of these

INTERVAL = 2.0  # seconds between two looks
RECENT = 10  # steps in a mean
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 40  # steps in a curve
SLOWEST = 4  # workers that are named
ROWS = (
    ("validation/exact_match", "exact match", ".1%"),
    ("validation/preference_accuracy", "held-out accuracy", ".1%"),
    ("validation/sft_loss", "held-out loss", ".4f"),
    ("reward/mean", "reward", ".3f"),
    ("sft/loss", "loss", ".4f"),
    ("dpo/loss", "loss", ".4f"),
    ("kto/loss", "loss", ".4f"),
    ("reference/kl", "KL", ".4f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/gradient_norm", "gradient norm", ".3f"),
    ("rollout/response_length", "response length", ",.0f"),
    ("rollout/truncated_fraction", "truncated", ".1%"),
    ("rollout/staleness_mean", "staleness", ".2f"),
    ("rollout/log_prob_difference_mean", "engine to trainer", ".1e"),
    ("throughput/tokens_per_second", "tokens/s", ",.0f"),
    ("time/step", "seconds per step", ".1f"),
    ("actor/gpu_peak_gib", "GPU memory, GiB", ".1f"),
    ("gpu/utilization", "GPUs busy", ".0%"),
    ("gpu/utilization_lowest", "least busy GPU", ".0%"),
    ("mfu/old_log_prob", "MFU, log-probs", ".1%"),
    ("mfu/update_critic", "MFU, critic update", ".1%"),
    ("mfu/update_actor", "MFU, actor update", ".1%"),
    ("throughput/generated_tokens_per_second", "sampled tokens/s", ",.0f"),
    ("engines/busy", "engines busy", ".0%"),
    ("engines/running_share", "engines full", ".0%"),
    ("engines/imbalance", "longest engine / mean", ".2f"),
    ("idle/rollout", "engines' devices idle, s", ".1f"),
    ("idle/actor", "actor's devices idle, s", ".1f"),
)
"""Metrics with heading and format; those that the run records are shown."""


def watch(run_dir: Path, console: Console) -> None:
    """Shows the run until it has ended or the user interrupts; once if the console is no terminal. Raises DataError."""
    if console.is_terminal:
        with Live(screen(run_dir), console=console, auto_refresh=False, screen=True) as live:
            while _silent_seconds(run_dir) is not None:
                time.sleep(INTERVAL)
                live.update(screen(run_dir), refresh=True)
    console.print(screen(run_dir))


def screen(run_dir: Path) -> RenderableType:
    """The current state of the run as a table. Raises DataError if the directory holds no run, or a damaged file."""
    metrics = run_dir / METRICS
    if not (run_dir / CONFIG).is_file():
        raise DataError(f"{run_dir}: no run there", hint="name the directory of a run, such as runs/ID")
    if not metrics.is_file() or not metrics.stat().st_size:
        return Group(_state(run_dir, None), Text("no step is finished yet", style="dim"))
    run = read_run(run_dir)
    notes = [Text(printable(note), style="yellow") for note in run.notes]
    return Group(_state(run_dir, run), *notes, "", _phases(run), "", _metrics(run), *_waits(run), *_gpus())


def _state(run_dir: Path, run: RecordedRun | None) -> Table:
    """Two lines: name and progress; what it does now, where."""
    phase, owner = _document(run_dir / PHASE, _PHASE), _document(run_dir / OWNER, _OWNER)
    silent = _silent_seconds(run_dir)
    step, total = (run.rows[-1]["step"] if run else 0), phase.get("total_steps", 0)
    progress = f"step {step:.0f} of {total}" if total else f"step {step:.0f}"
    if silent is None:
        doing, where = "ended", ""
    else:
        seconds = max(0.0, time.time() - phase.get("since", time.time()))
        doing = f"{phase.get('phase', 'starting').replace('_', ' ')} for {seconds:.0f} s"
        where = f"process {owner.get('pid')} on {owner.get('host')}"
        if silent > SILENT_SECONDS:
            doing, where = f"no sign of life for {_duration(silent)}", f"last {where}"
        elif run and total > step:
            left = (total - step) * median(run.series("time/step")[1])
            progress += f", about {_duration(left)} left"
    table = Table.grid(expand=True)
    table.add_column()
    table.add_column(justify="right")
    table.add_row(Text(printable(run_dir.resolve().name), style="bold"), progress)
    style = "green" if silent is not None and silent <= SILENT_SECONDS else "yellow"
    table.add_row(Text(printable(doing), style=style), Text(printable(where)))
    return table


def _duration(seconds: float) -> str:
    try:
        return str(timedelta(seconds=round(seconds)))
    except (OverflowError, ValueError):  # of a damaged record
        return "unknown time"


def _silent_seconds(run_dir: Path) -> float | None:
    """Seconds since the last heartbeat of the run's process; None if it has ended, or cannot be read."""
    try:
        return max(0.0, time.time() - (run_dir / OWNER).lstat().st_mtime)
    except OSError:
        return None


def _document(path: Path, kind: TypeAdapter[Document]) -> Document:
    """A JSON object; empty while there is none, or a half of it."""
    try:
        return kind.validate_json(read_regular(path, _MOST_BYTES))
    except (OSError, ValidationError):
        return kind.validate_python({})


def _phases(run: RecordedRun) -> Table:
    """Where the time of the last step went, longest phase first."""
    row = next((row for row in reversed(run.rows) if "time/step" in row), {"time/step": 0.0})
    whole = row["time/step"]
    named = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
    shown = {name: value for name, value in named.items() if name not in ("step", "start_up") and value <= whole}
    shown["other"] = max(0.0, whole - sum(shown.values()))
    table = Table.grid(padding=(0, 1), expand=True)
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify, ratio=1 if justify == "left" and table.columns else None)
    table.add_row(Text(f"step {row.get('step', 0):.0f}", style="bold"), "", f"{whole:.1f} s", "")
    for name, value in sorted(shown.items(), key=lambda item: -item[1]):
        if value >= 0.005 * whole:
            bar = Bar(whole or 1.0, 0.0, value, color="cyan")
            table.add_row(
                Text(printable(name.replace("_", " "))), bar, f"{value:.1f} s", f"{value / (whole or 1.0):.0%}"
            )
    return table


def _metrics(run: RecordedRun) -> Table:
    table = Table(box=None, expand=True, header_style="bold", padding=(0, 1), pad_edge=False)
    table.add_column("")
    for heading in ("now", f"mean of {RECENT}"):
        table.add_column(heading, justify="right")
    table.add_column(f"last {CURVE} steps", ratio=1)
    for metric, heading, form in ROWS:
        values = [value for value in run.series(metric)[1] if value == value]  # a NaN differs from itself
        if values:
            mean = statistics.fmean(values[-RECENT:])
            table.add_row(heading, f"{values[-1]:{form}}", f"{mean:{form}}", Text(curve(values[-CURVE:]), style="cyan"))
    return table


def _waits(run: RecordedRun) -> list[RenderableType]:
    """The workers for which others waited a noticeable part of the last steps; nothing if all were about as fast."""
    rows = run.waits[-RECENT:]
    whole = sum(run.series("time/step")[1][-len(rows) :]) if rows else 0.0
    waits = noticed(rows, whole)
    if not waits:
        return []
    table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for heading in ("waited for", "seconds per step", f"slowest in the last {len(rows)} steps"):
        table.add_column(heading, justify="left" if heading == "waited for" else "right")
    for wait in waits[:SLOWEST]:
        table.add_row(Text(printable(wait.worker)), f"{wait.seconds / len(rows):.2f}", f"{wait.steps}")
    return ["", table]


def curve(values: Sequence[float]) -> str:
    """The values as a line of blocks, from the lowest to the highest of them."""
    lowest, highest = min(values), max(values)
    if highest == lowest:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[round((value - lowest) / (highest - lowest) * (len(BLOCKS) - 1))] for value in values)


def _gpus() -> list[RenderableType]:
    """The NVIDIA GPUs of this host; nothing where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for heading in ("GPUs of this host", "busy", "memory", "power"):
        table.add_column(heading, justify="left" if heading.startswith("GPU") else "right")
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        table.add_row(
            f"{index}  {pynvml.nvmlDeviceGetName(handle)}",
            f"{pynvml.nvmlDeviceGetUtilizationRates(handle).gpu} %",
            f"{memory.used / 2**30:.0f} of {memory.total / 2**30:.0f} GiB",
            f"{pynvml.nvmlDeviceGetPowerUsage(handle) / 1000:.0f} W",
        )
    return ["", table]
