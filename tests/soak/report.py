"""The tables of a soak: what happened, what grew, and whether the curves are those of runs without faults."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tests.chaos.counting import rows_of
from tests.json_lines import read_rows
from tests.soak.run import MODES
from tests.soak.samples import growth
from tests.trainer.whole_run import NOT_RESULTS

SETTLED = 300.0
"""Seconds after a start or a fault in which caches may fill; in a long stretch its earlier half."""
FLAT = 0.05
"""Largest growth per hour, of the level."""
LEAST = {"MiB": 20.0, "processes": 1.0, "descriptors": 5.0}
"""Growth per hour below which a quantity is flat at any level."""
Rows = Sequence[Mapping[str, Any]]


def report(directory: Path) -> tuple[str, bool]:
    """Markdown, and whether everything was as promised."""
    events, samples = read_rows(directory / "events.jsonl"), read_rows(directory / "samples.jsonl")
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in events)]
    lines, problems = [], list[str]()
    lines += ["| mode | steps | faults | jobs | processes, files left | false alarms of a stall | curve |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for mode in modes:
        lines.append(outcome(directory, mode, [row for row in events if row["mode"] == mode], problems))
    lines += ["", "| held | " + " | ".join(f"{mode}, growth an hour" for mode in modes) + " |"]
    lines += ["| --- |" + " --- |" * len(modes)]
    names = [name for name in (samples[0] if samples else {}) if name not in ("mode", "stretch", "seconds")]
    for name in names:
        cells = [grown(name, [row for row in samples if row["mode"] == mode], mode, problems) for mode in modes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"problem: {problem}" for problem in problems)]
    return "\n".join(lines) + "\n", not problems


def outcome(directory: Path, mode: str, events: Rows, problems: list[str]) -> str:
    """A row of the first table."""
    jobs = [row for row in events if row["event"] == "ended"]
    faults = [row for row in events if row["event"] not in ("started", "not started", "ended")]
    left = max((row["processes"] for row in jobs), default=0)
    files = max((len(row["files"]) for row in jobs), default=0)
    log = directory / f"{mode}.log"
    text = log.read_text() if log.exists() else ""
    alarms = text.count("no progress in") - sum("stopped" in row["event"] for row in faults)
    same = curve(directory, mode, problems)
    for wrong, kind in ((left, "processes left"), (files, "files left"), (text.count("Traceback"), "tracebacks")):
        if wrong:
            problems.append(f"{mode}: {wrong} {kind}")
    steps = max((int(row["step"]) for row in rows_of(directory / mode)), default=0)
    return f"| {mode} | {steps} | {len(faults)} | {len(jobs)} | {left}, {files} | {max(alarms, 0)} | {same} |"


def curve(directory: Path, mode: str, problems: list[str]) -> str:
    """How the run compares with the one without faults, over the steps of both."""
    disturbed, undisturbed = (by_step(directory / name) for name in (mode, f"{mode}-undisturbed"))
    steps = sorted(set(disturbed) & set(undisturbed))
    if not steps:
        return "-"
    different = [step for step in steps if results(disturbed[step]) != results(undisturbed[step])]
    if not different:
        return f"equal to the bit over {len(steps)} steps"
    last = steps[-len(steps) // 4 :]
    means = [mean(run[step]["reward/mean"] for step in last) for run in (disturbed, undisturbed)]
    if mode != "asynchronous":
        problems.append(f"{mode}: differs from the run without faults from step {different[0]} on")
    return f"reward of steps {last[0]} to {last[-1]}: {means[0]:.3f}, without faults {means[1]:.3f}"


def results(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metrics that settings and seed decide; a last step is also validated."""
    others = (*NOT_RESULTS, "checkpoint/", "validation/")
    return {name: value for name, value in row.items() if not name.startswith(others)}


def by_step(run_dir: Path) -> dict[int, Mapping[str, Any]]:
    """The last record of each step."""
    return {int(str(row["step"])): row for row in rows_of(run_dir)}


def grown(name: str, samples: Rows, mode: str, problems: list[str]) -> str:
    """A cell of the second table."""
    stretches = []
    for stretch in dict.fromkeys(row["stretch"] for row in samples):
        rows = [row for row in samples if row["stretch"] == stretch]
        settled = max(stretch + SETTLED, (stretch + rows[-1]["seconds"]) / 2)
        rows = [row for row in rows if row["seconds"] > settled]
        stretches.append(([row["seconds"] for row in rows], [row[name] for row in rows]))
    level, slope = growth([stretch for stretch in stretches if len(stretch[0]) > 1])
    if level != level:
        return "-"
    least = next((least for unit, least in LEAST.items() if unit in name), 0.0)
    if slope > max(FLAT * level, least) and "files" not in name and "size" not in name:
        problems.append(f"{mode}: {name} grows by {slope:.1f} an hour")
    return f"{level:.0f}, {slope:+.1f}"
