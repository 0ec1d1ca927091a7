"""Writes the measured rows as tables of benchmarks/measured/tables.md, with a section per kind of job.

    python3 -m benchmarks.gpu.table [FILE_OR_DIRECTORY…]

Rows are those of `benchmarks.gpu.session`, by default benchmarks/gpu/measured.jsonl. Of rows of the same job the last
one counts.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.rivals.verl import PHASES
from benchmarks.results import read_rows, wrapped, write_section

ROOT = Path(__file__).resolve().parents[2]
MEASURED = Path(__file__).with_name("measured.jsonl")
PAGE = ROOT / "benchmarks" / "measured" / "tables.md"
Row = dict[str, Any]
STEPS = ("step", "ppo_step")  # and the name of older rows


def all_rows(paths: Iterable[Path]) -> list[Row]:
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    return [row for file in files for row in read_rows(file)]


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in table)


def origin(rows: Sequence[Row], command: str = "python3 -m benchmarks.gpu.session") -> str:
    devices, dates = sorted({row["device"] for row in rows}), sorted({row["date"] for row in rows})
    return f"{', '.join(devices)}, {', '.join(dates)}. `{command}`."


def beside_verl(rows: Sequence[Row]) -> str:
    """Seconds and GiB of each phase on both sides, and verl's step divided by this trainer's."""
    steps = [row for row in _steps(rows) if row.get("algorithm", "ppo") == "ppo"]
    ours = {row["name"]: row for row in steps if row["side"] == "ours"}
    theirs = {_job(row): row for row in steps if row["side"] == "verl"}
    pairs = {
        name: (row, theirs.get(_job(row)))
        for name, row in sorted(ours.items())
        if not name.startswith(("split", "scaling", "fixed-order"))
    }

    def line(title: str, text: Callable[[Row], Any]) -> list[Any]:
        return [title, *(f"{text(ours)} / {text(verl) if verl else '-'}" for ours, verl in pairs.values())]

    ratios = [_ratio(ours, verl) for ours, verl in pairs.values()]
    times = [
        *(line(phase, partial(_seconds, phase)) for phase in PHASES),
        ["verl's step ÷ ours", *ratios],
        line("tokens/s", lambda row: f"{row['tokens_per_second']:,}"),
        line("s to the first step", partial(_seconds, "seconds_to_first_step", digits=0)),
        line("steps measured", lambda row: row["steps"]),
        line("tokens of a micro-batch", lambda row: f"{row['tokens']:,}" if row["tokens"] else "chosen"),
    ]
    header, used = ["here / verl 0.9.1", *pairs], [row for pair in pairs.values() for row in pair if row]
    return "\n\n".join(
        [
            f"Columns: shape, tokens of prompt and response. Seconds. {origin(used)} 7B has four GPUs, all others have "
            "one if their name says no more, and as many jobs ran side by side as fit, each with its share of the "
            "cores. A dash: not measured; where that is all of verl, no step ended in time. Where 0 steps were "
            "measured, the times are those of the first step, which is slower than the next. With `-offload` the "
            "optimizers' states leave the GPU between steps, and at 0.5B activations are made again; verl's columns "
            "beside these two come from another machine of the same kind, and machines differ: its step of "
            "1.5B-256-1024 took 92 s on one and 111 on the other, most of that in generation.",
            markdown(header, times),
            "GiB in use on the GPU (of four, the fullest) by all processes together, the most in each phase. On "
            "2026-11-21 they count the benchmark's own process on this side, which held 3 GiB at 0.5B and 7 at 1.5B; "
            "since then it is left out:",
            markdown(header, (line(phase, partial(_gib, phase)) for phase in PHASES if phase != "step")),
        ]
    )


def _steps(rows: Sequence[Row]) -> list[Row]:
    """The rows of runs in which a step ended."""
    return [row for row in rows if row["benchmark"] in STEPS and "step" in row]


def grpo_beside_rivals(rows: Sequence[Row]) -> str:
    """Seconds of each phase of GRPO here, on verl and on TRL, with a column for each run."""
    runs = [row for row in _steps(rows) if row.get("algorithm") == "grpo" and row["name"].startswith("grpo")]
    if not runs:
        return ""
    names = {"ours": "here", "verl": "verl", "trl": "TRL"}
    order = sorted(runs, key=lambda row: (row["name"], _place(row), list(names).index(row["side"])))

    def title(row: Row) -> str:
        kept = ", activations kept" if row.get("keeps_activations") else ""
        exact = ", exact" if "actor.backend=exact" in row.get("overrides", ()) else ""
        defaults = "" if row["tokens"] else ", defaults"
        return f"{row['name'].removeprefix('grpo-')}: {names[row['side']]}{kept}{exact}{defaults}, {_place(row)}"

    def line(name: str, text: Callable[[Row], Any]) -> list[Any]:
        return [name, *map(text, order)]

    lines = [
        *(line(phase, partial(_seconds, phase)) for phase in PHASES if any(phase in row for row in order)),
        line("tokens/s", lambda row: f"{row['tokens_per_second']:,}"),
        line("tokens per step", lambda row: f"{row['tokens_per_step']:,}"),
        line("peak GiB", lambda row: max(row["peak_gib"].values(), default="-")),
        line("steps measured", lambda row: row["steps"]),
    ]
    about = (
        "Columns: shape and most tokens of a response, trainer, machine; 8 responses to a prompt. Seconds. TRL "
        f"computes no old log-probs. {origin(order)}"
    )
    return f"{about}\n\n{markdown(['', *map(title, order)], lines)}"


def _job(row: Row) -> tuple[Any, ...]:
    """The key of a comparison: the job and the machine, equal on both sides."""
    return _place(row), *(row[name] for name in ("shape", "gpus", "batch", "prompt", "response"))


def _place(row: Row) -> str:
    """The machine, because machines of one kind differ; the day for old rows that do not name it."""
    return str(row.get("machine", row["date"]))


def _ratio(ours: Row, verl: Row | None) -> str:
    if verl is None:
        return "-"
    ratio = f"{verl['step'] / ours['step']:.1f}"
    return f"**{ratio}**" if verl["steps"] else f"{ratio} (its first)"


def _seconds(name: str, row: Row, digits: int = 2) -> str:
    return f"{row[name]:.{digits}f}" if name in row else "-"


def _gib(phase: str, row: Row) -> Any:
    return row["peak_gib"].get(phase, "-")


def generation(rows: Sequence[Row]) -> str:
    """vLLM alone and the trainer's engines, with and without log-probs."""
    engines = [row for row in rows if row["benchmark"] == "rollout" and "kind" in row]
    if not engines:
        return ""
    cells: dict[str, list[str]] = {}
    for row in sorted(engines, key=lambda row: not row["log_probs"]):
        title = "vLLM's `LLM`, its defaults" if row["kind"] == "offline" else f"the trainer's engines: {row['engines']}"
        cells.setdefault(title, []).extend([f"{row['seconds']:.2f}", f"{row['tokens_per_second']:,}"])
    header = ["", "with log-probs, s", "tokens/s", "without, s", "tokens/s"]
    job, most = engines[0], max(row["engines"] for row in engines)
    command = f"python3 -m benchmarks.gpu.rollout --shape {job['shape']} --engines {most}"
    about = (
        f"{job['shape']}, {job['prompts']} prompts of {job['prompt']} tokens, {job['response']} tokens each; the "
        f"better of two. {origin(engines, command)}"
    )
    return f"{about}\n\n{markdown(header, ([title, *cells_of_row] for title, cells_of_row in cells.items()))}"


def fast_path(rows: Sequence[Row]) -> str:
    """Engines with the decode fast path, and with vLLM's scheduler in every step."""
    engines = [row for row in rows if row["benchmark"] == "accounting"]
    if not engines:
        return ""

    def line(row: Row) -> list[Any]:
        whole, shortened = row["whole_seconds"], row["steady_seconds"]
        rate = f"{row['responses'] * row['response'] / shortened:,.0f}"
        log_probs = "with" if row["log_probs"] else "without"
        return [row["shape"], row["responses"], log_probs, whole, shortened, f"**{whole / shortened:.2f}**", rate]

    job = engines[0]
    command = f"python3 -m benchmarks.gpu.accounting --shape {job['shape']}"
    about = (
        f"One engine, prompts of {job['prompt']} tokens, {job['response']} tokens each; seconds, the better of two. "
        f"{origin(engines, command)}"
    )
    header = ["shape", "responses", "log-probs", "vLLM's scheduler", "fast path", "ratio", "tokens/s"]
    return f"{about}\n\n{markdown(header, map(line, engines))}"


def apart(rows: Sequence[Row]) -> str:
    """Engines and training on separate GPUs, in turn and side by side."""
    split = {row["name"]: row for row in rows if row["benchmark"] in STEPS and row["name"].startswith("split")}
    if len(split) < 2:
        return ""
    synchronous, ahead = split["split-synchronous"], split["split-one-step-off"]
    lines = [[phase, _seconds(phase, synchronous), _seconds(phase, ahead)] for phase in PHASES if phase in synchronous]
    return "\n\n".join(
        [
            f"0.5B, 512 prompts, 256 + 512 tokens; seconds. {origin([synchronous, ahead])}",
            markdown(["", "synchronous", "one step off"], lines),
            f"One step off takes **{ahead['step'] / synchronous['step']:.2f}** of the synchronous step.",
        ]
    )


def ahead(rows: Sequence[Row]) -> str:
    """Responses of very different lengths, synchronously and with a GPU each for learner and engines."""
    names = {"ours": "here", "verl-asynchronous": "verl"}
    runs = [row for row in _steps(rows) if row["name"].startswith("log-normal")]
    if not runs:
        return ""

    def line(row: Row) -> list[Any]:
        batches = _batches_ahead(row)
        how = f"asynchronous, at most {batches} updates ahead" if batches else "synchronous, on both GPUs"
        slowest = max(row["all_steps"][1:])
        rates = [f"{round(_rate_of_cycles(row)):,}", f"{row['overall_tokens_per_second']:,}"]
        return [_place(row), f"{names[row['side']]}, {how}", _seconds("step", row), f"{slowest:.1f}", *rates]

    job = runs[0]
    median, sigma = job["log_normal"]
    about = (
        f"GRPO of {job['shape']}, {job['batch']} prompts of {job['prompt']} tokens, {job['samples']} responses each, "
        f"of log-normal length (median {median:.0f}, sigma {sigma}) up to {job['response']:,} tokens; two GPUs. The "
        "first step waits for the responses of all steps that are sampled ahead. Later steps repeat in cycles of as "
        f"many, and the rate of whole cycles leaves the first one out. {origin(runs)}"
    )
    header = ["machine", "", "s a step, median", "slowest after the first", "tokens/s of whole cycles", "of all steps"]
    return f"{about}\n\n{markdown(header, map(line, runs))}"


def _batches_ahead(row: Row) -> int:
    setting = "trainer.max_staleness="
    limits = [int(text.removeprefix(setting)) for text in row.get("overrides", ()) if text.startswith(setting)]
    return limits[-1] if limits else int(row.get("ahead", 0))


def _rate_of_cycles(row: Row) -> float:
    """Tokens per second of the steps after the first, as many as are whole cycles of the batches ahead."""
    cycle, later = _batches_ahead(row) + 1, row["all_steps"][1:]
    steps = later[: max(cycle, len(later) // cycle * cycle)]
    return float(row["tokens_per_step"] * len(steps) / sum(steps))


def across(rows: Sequence[Row]) -> str:
    """Weights from an actor to an engine on another GPU, and the link between the two."""
    syncs = [row for row in rows if row["benchmark"] == "weights" and "sync_seconds" in row]
    if not syncs:
        return ""
    row = syncs[-1]
    lines = [
        ["the link alone, as many bytes", row["bytes_over_bandwidth_seconds"]],
        ["sync", f"**{row['sync_seconds']}**"],
        *([f"of it: {part.replace('_', ' ')}", seconds] for part, seconds in row["parts"].items()),
    ]
    about = (
        f"{row['shape']}, {row['bytes'] / 2**30:.2f} GiB by {row['way']}, whose link gives "
        f"{row['link_gb_per_second']:.0f} GB/s. {origin([row], 'python3 -m benchmarks.gpu.weights --split')} "
        "Parts are measured one by one; sending counts the copy to the node's memory beside it, receiving the loading."
    )
    return f"{about}\n\n{markdown(['what', 's'], lines)}"


def scaling(rows: Sequence[Row]) -> str:
    """Weak scaling: the number of prompts grows with the number of GPUs."""
    steps = [row for row in rows if row["benchmark"] in STEPS and row["name"].startswith("scaling") and "step" in row]
    if not steps:
        return ""
    alone = {_place(row): row["step"] for row in steps if row["gpus"] == 1}
    lines = [
        [
            _place(row),
            row["gpus"],
            row["batch"],
            f"{row['step']:.2f}",
            f"{row['tokens_per_second']:,}",
            f"{alone[_place(row)] / row['step']:.2f}" if _place(row) in alone else "-",
        ]
        for row in sorted(steps, key=lambda row: (row["date"], _place(row), row["gpus"]))
    ]
    header = ["machine", "GPUs", "prompts", "s a step", "tokens/s", "efficiency"]
    sharding = sorted({setting for row in steps for setting in row["overrides"] if ".sharding." in setting})
    about = f" With more than one GPU: `{'`, `'.join(sharding)}`." if sharding else ""
    unnamed = (
        " A day stands for a machine whose name was not kept." if any("machine" not in row for row in steps) else ""
    )
    return f"0.5B, 256 + 512 tokens. {origin(steps)}{about}{unnamed}\n\n{markdown(header, lines)}"


def start_up(rows: Sequence[Row]) -> str:
    """From `launch` to the first step, and a vLLM engine alone, where both were measured."""
    starts = {row["caches"]: row for row in rows if row["benchmark"] == "start_up" and {"vllm", "launch"} <= row.keys()}
    if not starts:
        return ""
    lines = [
        [state, row["vllm"], row["launch"], round(row["launch"] - row["vllm"], 1)] for state, row in starts.items()
    ]
    header = ["caches of kernels", "vLLM's engine alone", "`launch` to the first step", "beyond vLLM's"]
    shape = next(iter(starts.values()))["shape"]
    return f"{shape}; seconds. {origin(list(starts.values()))}\n\n{markdown(header, lines)}"


def training(rows: Sequence[Row]) -> str:
    """Speed and memory by the share of activations that compiled layers keep for the backward pass."""
    steps = [row for row in rows if row["benchmark"] == "train_step" and "mfu" in row]
    names = (
        "shape",
        "role",
        "phase",
        "micro_batch_tokens",
        "budget",
        "seconds",
        "tokens_per_second",
        "mfu",
        "peak_gib",
    )
    lines = [[row[name] for name in names] for row in steps]
    rates = sorted(row["matrix_tflops"] for row in steps)
    about = (
        f"{steps[0]['tokens']:,} tokens in rows of 256 + 512; MFU against the matrix rate of the same run "
        f"({rates[0]} to {rates[-1]} TFLOP/s). {origin(steps, 'python3 -m benchmarks.gpu.train_step')}"
    )
    header = ["shape", "network", "pass", "micro-batch", "budget", "seconds", "tokens/s", "MFU", "peak GiB"]
    return f"{about}\n\n{markdown(header, lines)}"


# What writes each section; nothing where there are no rows for it.
SECTIONS = {
    "PPO beside verl: longer prompts and responses, larger models": beside_verl,
    "GRPO beside verl and TRL": grpo_beside_rivals,
    "Generation on one GPU, 1.5B": generation,
    "Engines on a GPU of their own": apart,
    "Responses of log-normal length": ahead,
    "Decode fast path of an engine": fast_path,
    "Weights, actor to engine on another GPU": across,
    "More GPUs, more prompts": scaling,
    "Start-up on a GPU": start_up,
    "What the backward pass keeps": training,
}


def write(rows: Sequence[Row], page: Path) -> None:
    """Writes every section that has rows."""
    for title, section in SECTIONS.items():
        if body := section(rows):
            write_section(title, wrapped(body), page)


def main() -> None:
    write(all_rows([Path(argument) for argument in sys.argv[1:]] or [MEASURED]), PAGE)


if __name__ == "__main__":
    main()
