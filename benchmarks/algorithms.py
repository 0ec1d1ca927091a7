"""Learning curves of gae, grpo, rloo in all modes and DPO on the arithmetic task, into measured/learning.md.

    python -m benchmarks.algorithms [--seeds 3] [--steps 24] [--output runs/algorithms] [--only rloo rloo_asynchronous]

Runs where it is started, with the trainer's own packages (inside the cpu image, or an environment like it), on as many
nodes as the Ray cluster at RAY_ADDRESS has, else on this machine alone. What is there already is not run again, so an
interrupted benchmark goes on where it was. All runs of a seed start from the same model, trained to imitate a teacher
who mostly forgets to carry.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.results import read_rows, write_section

ROOT = Path(__file__).resolve().parents[1]
TITLE = "Algorithms on the arithmetic task"
FIGURE = ROOT / "benchmarks" / "measured" / "learning_curves.svg"

# What the algorithms have in common, and what each adds.
POLICY = (
    "actor.learning_rate=1e-4",
    "data.train_batch_size=64",
    "data.max_prompt_length=64",
    "actor.mini_batch_size=128",
    "rollout.samples_per_prompt=4",
    "trainer.test_freq=4",
    "trainer.save_freq=0",
)
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "gae": ("algorithm.advantage=gae", "critic.learning_rate=1e-3", "critic.mini_batch_size=128"),
    "grpo": ("algorithm.advantage=grpo", "algorithm.kl_coefficient=0", "actor.kl_loss_coefficient=0.01"),
    "rloo": ("algorithm.advantage=rloo",),
    "rloo_one_step_off": ("algorithm.advantage=rloo", "trainer.mode=one_step_off", "algorithm.correction=tis"),
    "rloo_asynchronous": (
        "algorithm.advantage=rloo",
        "trainer.mode=asynchronous",
        "algorithm.correction=tis",
        "trainer.max_staleness=2",
        "rollout.segment_length=4",
    ),
}
PREFERENCES = (
    "actor.learning_rate=1e-4",
    "data.train_batch_size=64",
    "data.max_prompt_length=64",
    "trainer.test_freq=4",
    "trainer.save_freq=0",
)


@dataclass(frozen=True)
class Curve:
    """The measurements of one run, and its greedy exact match on held-out questions before and after."""

    algorithm: str
    seed: int
    steps: list[int]
    values: list[float]
    before: float
    after: float
    seconds: float


def trainer(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "trainer", *arguments], cwd=ROOT, check=True)


def prepare(directory: Path, seed: int) -> Path:
    """Writes the questions, pairs and starting model of this seed. Returns the model's directory."""
    data, model = directory / "data", directory / "warm-start"
    if not (model / "config.json").is_file():
        trainer("data", "arithmetic", "--output", str(data), "--seed", str(seed))
        trainer("data", "preferences", "--output", str(data), "--seed", str(seed))
        demonstrations = f"train_files={data}/demonstrations.parquet"
        trainer("sft", demonstrations, f"validation_files={data}/validation.parquet", f"output={model}", f"seed={seed}")
    return model


def run(directory: Path, algorithm: str, seed: int, steps: int) -> Curve:
    """Does one run, unless its directory exists."""
    model, data, done = prepare(directory, seed), directory / "data", directory / algorithm / "seconds"
    shared = (
        f"model.path={model}",
        f"trainer.output_dir={directory}",
        f"trainer.run_id={algorithm}",
        f"trainer.seed={seed}",
        f"trainer.total_steps={steps}",
    )
    if not done.is_file():
        shutil.rmtree(directory / algorithm, ignore_errors=True)  # what an interrupted run left
        started = time.monotonic()
        if algorithm == "dpo":
            files = f"data.train_files={data}/preferences.parquet"
            trainer("dpo", *shared, *PREFERENCES, files, f"data.validation_files={data}/preferences-validation.parquet")
        else:
            files = f"data.train_files={data}/train.parquet"
            questions = f"data.validation_files={data}/validation.parquet"
            trainer("train", *shared, *POLICY, *ALGORITHMS[algorithm], files, questions)
        done.write_text(f"{time.monotonic() - started:.0f}")
    return curve(directory, algorithm, seed, float(done.read_text()))


def curve(directory: Path, algorithm: str, seed: int, seconds: float) -> Curve:
    metric = "validation/preference_accuracy" if algorithm == "dpo" else "validation/exact_match"
    rows = read_rows(directory / algorithm / "metrics.jsonl")
    rows = [row for row in rows if metric in row]
    steps, values = [row["step"] for row in rows], [row[metric] for row in rows]
    before, after = values[0], values[-1]
    if algorithm == "dpo":  # which samples nothing while it trains
        held_out = directory / "data" / "validation.parquet"
        models = (directory / "warm-start", directory / "dpo" / "model")
        before, after = (exact_match(model, held_out) for model in models)
    return Curve(algorithm, seed, steps, values, before, after, seconds)


def exact_match(model: Path, held_out: Path) -> float:
    """The share of held-out questions that a model answers correctly with greedy decoding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.runs.offline.warm_start import greedy_exact_match, read_exercises

    tokenizer = AutoTokenizer.from_pretrained(model)
    exercises = read_exercises([held_out], tokenizer)
    return greedy_exact_match(AutoModelForCausalLM.from_pretrained(model), tokenizer, exercises, max_response_length=16)


def draw(curves: list[Curve]) -> None:
    """Plots a panel per algorithm with a line per seed."""
    names = list(dict.fromkeys(result.algorithm for result in curves))
    figure = Figure(figsize=(15, 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        for result in curves:
            if result.algorithm == name:
                axes.plot(result.steps, result.values, marker=".", label=f"seed {result.seed}")
        axes.set(title=name, xlabel="step", ylim=(-0.02, 1.02))
        axes.set_ylabel("pairs in the right order" if name == "dpo" else "exact match, held-out")
        axes.grid(alpha=0.2)
    figure.axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(FIGURE, metadata={"Date": None})


def section(curves: list[Curve], command: str) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    lines = [
        "Greedy exact match on 256 held-out questions, before and after; all runs of a seed start from the same model.",
        f"Measured on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {memory:.0f} GiB, no GPU, by `{command}`.",
        "",
        f"![Learning curves]({FIGURE.name})",
        "",
        "| algorithm | steps | before, by seed | after, by seed | mean after | seconds a run |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(result.algorithm for result in curves):
        runs = [result for result in curves if result.algorithm == name]
        before = " ".join(f"{result.before:.3f}" for result in runs)
        after = " ".join(f"{result.after:.3f}" for result in runs)
        mean, seconds = (
            statistics.fmean(result.after for result in runs),
            statistics.fmean(result.seconds for result in runs),
        )
        lines.append(f"| {name} | {runs[0].steps[-1]} | {before} | {after} | {mean:.3f} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves of the algorithms on the arithmetic task.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path, default=Path("runs/algorithms"))
    names = (*ALGORITHMS, "dpo")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ALGORITHM")
    options = parser.parse_args()
    curves = [
        run(options.output.absolute() / f"seed{seed}", name, seed, options.steps)
        for seed in range(options.seeds)
        for name in options.only
    ]
    draw(curves)
    text = section(curves, f"python -m benchmarks.algorithms --seeds {options.seeds} --steps {options.steps}")
    write_section(TITLE, text)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
