"""Steps of PPO (critic and reference) or GRPO (reference): the same job on this trainer, verl and TRL, one by one.

    python -m benchmarks.gpu.step --shape 0.5B --response 512 [--side ours|verl|both|verl-asynchronous|trl] [KEY=VALUE…]
    python -m benchmarks.gpu.step --shape 1.5B --algorithm grpo --batch 64 --samples 8 --response 2048 --mean 500

KEY=VALUE are settings of this trainer; those of verl and TRL are in benchmarks/gpu/rivals. With `--mean` lengths of
responses are geometric, with `--log-normal` of that distribution (`benchmarks.gpu.lengths`); without either, every
response reaches the limit. Times are medians over the steps after the first, memory is the most in any of them.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.common import SHAPES, Results, arguments, write_job
from benchmarks.gpu.lengths import LEAST_SIGMA, geometric, log_normal
from benchmarks.gpu.memory import MemorySampler
from benchmarks.gpu.rivals import trl, verl
from benchmarks.results import read_rows

ROOT = Path(__file__).resolve().parents[2]
JOB = ("name", "shape", "algorithm", "gpus", "batch", "samples", "prompt", "response", "mean", "log_normal")
GRPO = {
    "algorithm.advantage": "grpo",
    "algorithm.kl_coefficient": 0,
    "actor.kl_loss_coefficient": 0.001,
    "actor.kl_loss_estimator": "k3",
}
BY_HAND = {"rollout.max_num_seqs": 1024}
MICRO_BATCHES = ("actor.micro_batch_tokens", "critic.micro_batch_tokens")


class Step(NamedTuple):
    """When a step ended, the seconds of its phases in their order, and its tokens of prompts and responses."""

    end: float
    seconds: dict[str, float]
    tokens: float


def run(command: list[str], log: Path, timeout: float) -> list[tuple[float, str]]:
    """Runs a command with its output in `log`, each line after the seconds since the start. Returns its lines with
    their times; kills it at the deadline."""
    lines, began = [], time.time()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    # With all that it started: what survives would keep the pipe open, and this would read on.
    killer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    killer.start()
    with log.open("w") as file:
        for line in process.stdout or ():
            lines.append((time.time(), line))
            file.write(f"{time.time() - began:7.1f}  {line}")
            file.flush()
    process.wait()
    killer.cancel()
    return lines


def ours(job: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The phases of this trainer, from its metrics."""
    run_id = f"gpu-{options.shape}-{options.prompt}-{options.response}-{time.time():.0f}"
    responses = options.batch * options.samples
    settings = {
        "model.path": job / "model",
        "model.dtype": "float32" if options.cpu else "bfloat16",
        "data.train_files": job / "train.parquet",
        "data.validation_files": job / "validation.parquet",
        "data.max_prompt_length": options.prompt,
        "data.max_response_length": options.response,
        "data.train_batch_size": options.batch,
        "rollout.samples_per_prompt": options.samples,
        "rollout.ignore_end_tokens": "false" if options.varies else "true",
        **(GRPO if options.algorithm == "grpo" else {}),
        "actor.mini_batch_size": responses,
        "critic.mini_batch_size": responses,
        "reward.name": "exact_match",
        "trainer.total_steps": options.steps,
        "trainer.save_freq": 0,
        "trainer.test_freq": -1,
        "trainer.test_before_training": "false",
        "trainer.n_gpus_per_node": 0 if options.cpu else options.gpus,
        "trainer.output_dir": options.logs / "runs",
        "trainer.run_id": run_id,
        "trainer.worker_timeout": 400,
        **(BY_HAND | dict.fromkeys(MICRO_BATCHES, options.tokens) if options.tokens else {}),
        **dict(override.split("=", 1) for override in options.overrides),
    }
    program = "entrypoints" if options.launch else "trainer"
    command = [sys.executable, "-m", program, "train", *(f"{key}={value}" for key, value in settings.items())]
    began = time.time()
    with MemorySampler() as memory:
        run(command, options.logs / f"ours-{options.name}.log", options.timeout)
    metrics = options.logs / "runs" / run_id / "metrics.jsonl"
    rows = [row for row in read_rows(metrics) if "time/step" in row] if metrics.exists() else []
    # After the last step the model is validated, and only then is the row written.
    steps = [
        Step(
            row["wall_time"] - row.get("time/validate", 0.0),
            _own_phases(row),
            responses * (options.prompt + row["rollout/response_length"]),
        )
        for row in rows
    ]
    extra = ("log_prob_difference", "log_prob_difference_mean", "ratio_outside_tenth")
    compared = [row for row in rows if "rollout/log_prob_difference" in row]
    agreement = {name: compared[-1][f"rollout/{name}"] for name in extra if compared}
    busy = [row["gpu/utilization"] for row in rows[1:] if "gpu/utilization" in row]
    utilization = {"gpu_utilization": round(statistics.median(busy), 3)} if busy else {}
    return summary(steps, memory, began) | agreement | utilization


def theirs(job: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The phases of verl, from its log."""
    return _logged_by_verl(verl.command(job, options), options)


def theirs_asynchronously(job: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The phases of verl's fully asynchronous trainer; `generate` is the time in which that waits for responses."""
    return _logged_by_verl(verl.asynchronous(job, options), options)


def _logged_by_verl(command: list[str], options: argparse.Namespace) -> dict[str, Any]:
    began = time.time()
    with MemorySampler() as memory:
        lines = run(command, options.logs / f"verl-{options.name}.log", options.timeout)
    logged = [(when, dict(verl.NUMBER.findall(line))) for when, line in lines if verl.STEP.search(line)]
    steps = [Step(when, _verls_phases(row), float(row[verl.TOKENS])) for when, row in logged if verl.TOKENS in row]
    return summary(steps, memory, began)


def trls(job: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The phases of TRL, from the rows of `benchmarks.gpu.rivals.trl`."""
    began = time.time()
    rows = options.logs / f"trl-{options.name}-{began:.0f}.jsonl"
    with MemorySampler() as memory:
        run(trl.command(job, options, rows), options.logs / f"trl-{options.name}.log", options.timeout)
    return summary([Step(**row) for row in (read_rows(rows) if rows.exists() else [])], memory, began)


def _own_phases(row: Mapping[str, Any]) -> dict[str, float]:
    """The phases that verl has too, in this trainer's order, which waits for rewards later than verl."""
    named = ((key.removeprefix("time/"), value) for key, value in row.items())
    return {name: float(value) for name, value in named if name in verl.PHASES}


def _verls_phases(line: Mapping[str, str]) -> dict[str, float]:
    keys = {phase: f"timing_s/{name}" for phase, name in verl.PHASES.items()}
    return {phase: float(line[key]) for phase, key in keys.items() if key in line}


def summary(steps: list[Step], memory: MemorySampler, began: float) -> dict[str, Any]:
    """Median seconds and peak memory of the steps after the first."""
    if not steps:
        return {"error": "no step ended"}
    first, measured = steps[0], steps[1:] or steps
    medians = {phase: statistics.median(step.seconds[phase] for step in measured) for phase in measured[0].seconds}
    phases = [
        (step.end, {phase: seconds for phase, seconds in step.seconds.items() if phase != "step"}) for step in measured
    ]
    return {
        "steps": len(steps) - 1,
        **{phase: round(seconds, 3) for phase, seconds in medians.items()},
        "all_steps": [round(step.seconds["step"], 2) for step in steps],
        "all_generate": [round(step.seconds["generate"], 2) for step in steps],
        "tokens_per_step": round(statistics.mean(step.tokens for step in measured)),
        "tokens_per_second": round(statistics.median(step.tokens / step.seconds["step"] for step in measured)),
        # Of all steps: what is sampled ahead lengthens the first and shortens others.
        "overall_tokens_per_second": round(
            sum(step.tokens for step in steps) / sum(step.seconds["step"] for step in steps)
        ),
        "seconds_to_first_step": round(first.end - first.seconds["step"] - began, 1),
        "seconds_to_end_of_first_step": round(first.end - began, 1),
        "peak_gib": memory.peaks(phases),
    }


SIDES = {"ours": ours, "verl": theirs, "verl-asynchronous": theirs_asynchronously, "trl": trls}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512, help="prompts per step")
    parser.add_argument("--algorithm", choices=["ppo", "grpo"], default="ppo")
    parser.add_argument("--samples", type=int, default=1, help="responses to each prompt")
    varying = parser.add_mutually_exclusive_group()
    varying.add_argument("--mean", type=float, default=0, help="tokens of a response, if no limit ended it")
    varying.add_argument(
        "--log-normal",
        type=float,
        nargs=2,
        default=[],
        metavar=("MEDIAN", "SIGMA"),
        help="lengths of responses, in tokens",
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--tokens",
        type=int,
        default=32768,
        help="tokens of a micro-batch here; 0: as by default, with as many sequences at a time",
    )
    parser.add_argument("--rival-tokens", type=int, default=32768, help="tokens of a micro-batch there")
    parser.add_argument("--rival-keeps", action="store_true", help="verl or TRL keeps activations, without recomputing")
    parser.add_argument("--rival-ahead", type=int, default=4, help="batches that verl-asynchronous samples ahead")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--name", help="of the logs; shape and lengths if not given")
    parser.add_argument("--side", choices=[*SIDES, "both"], default="both")
    parser.add_argument("--launch", action="store_true", help="begin with `launch`, which starts Ray")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for each side")
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/slipway-logs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.side == "trl" and (options.algorithm != "grpo" or options.gpus != 1):
        parser.error("--side trl measures GRPO on one GPU: give --algorithm grpo, and no --gpus")
    if options.side == "verl-asynchronous" and (options.algorithm != "grpo" or options.gpus != 2):
        parser.error("--side verl-asynchronous trains on one GPU and samples on one: give --algorithm grpo --gpus 2")
    if options.log_normal and options.log_normal[1] < LEAST_SIGMA:
        parser.error(f"--log-normal: SIGMA is at least {LEAST_SIGMA:.2f}, that of geometric lengths")
    options.logs.mkdir(parents=True, exist_ok=True)
    results = Results(options.out, "step")
    means = log_normal(*options.log_normal) if options.log_normal else geometric(options.mean) if options.mean else []
    name = "-".join(map(str, (options.shape, options.prompt, *(options.log_normal or [options.mean]))))
    # Few prompts of great length: each trainer reads all of them before its first step.
    prompts = min(2048, 2**22 // options.prompt)
    job = write_job(options.jobs / name, options.shape, options.prompt, prompts, means)
    options.varies = bool(means)
    options.name = options.name or f"{options.shape}-{options.prompt}-{options.response}"
    sides = ("ours", "verl") if options.side == "both" else (options.side,)
    for side in sides:
        job_of = {name: getattr(options, name) for name in JOB}
        settings = {"tokens": options.rival_tokens, "keeps_activations": options.rival_keeps}
        if side == "ours":
            settings = {"tokens": options.tokens, "overrides": options.overrides}
        if side == "verl-asynchronous":
            settings["ahead"] = options.rival_ahead
        results.add(side=side, **job_of, **settings, **SIDES[side](job, options))


if __name__ == "__main__":
    main()
