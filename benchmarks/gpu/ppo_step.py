"""One PPO step, critic and reference included: this trainer and verl, the same job, one after the other.

    python -m benchmarks.gpu.ppo_step --shape 0.5B --response 512 [--side ours|verl|both] [KEY=VALUE…]

KEY=VALUE are settings of this trainer. verl runs as its documentation advises: dynamic batches, rows without padding,
fused kernels, one mini-batch. Times are medians over the steps after the first.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, arguments, write_job

ROOT = Path(__file__).resolve().parents[2]
PHASES = {
    "generate": "gen",
    "reward": "reward",
    "old_log_prob": "old_log_prob",
    "reference": "ref",
    "values": "values",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "sync_weights": "update_weights",
    "step": "step",
}


def run(command: list[str], log: Path, timeout: float) -> float:
    """Runs a command with its output in `log`; seconds it took."""
    start = time.perf_counter()
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=timeout, check=False)
    return time.perf_counter() - start


def ours(job: Path, options: Any) -> dict[str, Any]:
    """Medians of this trainer's own metrics."""
    run_id = f"gpu-{options.shape}-{int(time.time())}"
    tokens = options.batch * (options.prompt + options.response)
    settings = {
        "model.path": job / "model",
        "model.dtype": "float32" if options.cpu else "bfloat16",
        "data.train_files": job / "train.parquet",
        "data.validation_files": job / "validation.parquet",
        "data.max_prompt_length": options.prompt,
        "data.max_response_length": options.response,
        "data.train_batch_size": options.batch,
        "rollout.samples_per_prompt": 1,
        "rollout.max_num_seqs": 1024,
        "rollout.ignore_end_tokens": "true",
        "actor.mini_batch_size": options.batch,
        "critic.mini_batch_size": options.batch,
        "actor.micro_batch_tokens": options.tokens,
        "critic.micro_batch_tokens": options.tokens,
        "reward.name": "exact_match",
        "trainer.total_steps": options.steps,
        "trainer.save_freq": 0,
        "trainer.test_freq": -1,
        "trainer.output_dir": options.logs / "runs",
        "trainer.run_id": run_id,
        "trainer.worker_timeout": 400,
        **dict(override.split("=", 1) for override in options.overrides),
    }
    log = options.logs / f"ours-{options.shape}-{options.response}.log"
    command = [sys.executable, "-m", "trainer", "train", *(f"{key}={value}" for key, value in settings.items())]
    wall = run(command, log, options.timeout)
    return {"wall_seconds": round(wall), **from_metrics(options.logs / "runs" / run_id / "metrics.jsonl", tokens)}


def from_metrics(path: Path, tokens: int) -> dict[str, Any]:
    import json

    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [row for row in rows if row["step"] > 1] or [row for row in rows if row["step"] == 1]
    found = {
        phase: round(statistics.median(row[f"time/{phase}"] for row in steps), 3)
        for phase in PHASES
        if steps and f"time/{phase}" in steps[0]
    }
    extra = ("log_prob_difference", "log_prob_difference_mean", "ratio_outside_tenth")
    agreement = {name: steps[-1][f"rollout/{name}"] for name in extra if steps and f"rollout/{name}" in steps[-1]}
    rate = {"tokens_per_second": round(tokens / found["step"])} if "step" in found else {}
    return {"steps": len(steps), **found, **rate, **agreement}


def verl(job: Path, options: Any) -> dict[str, Any]:
    """Medians of the times that verl logs."""
    script = options.verl / "verl_ppo.sh"
    command = ["bash", str(script), str(job), *map(str, (options.prompt, options.response, options.batch))]
    command += [str(options.steps), "1", f"data.val_files={job / 'validation.parquet'}"]
    os.environ["MAX_TOKENS"] = str(options.tokens)
    log = options.logs / f"verl-{options.shape}-{options.response}.log"
    wall = run(command, log, options.timeout)
    return {"wall_seconds": round(wall), **from_verl_log(log.read_text(errors="replace"), options)}


def from_verl_log(text: str, options: Any) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if re.search(r"step:\d+ - ", line)]
    steps = [dict(re.findall(r"([\w/]+):(?:np\.float64\()?(-?[\d.]+(?:e-?\d+)?)", line)) for line in lines]
    steps = steps[1:] or steps
    found = {}
    for phase, theirs in PHASES.items():
        values = [float(step[f"timing_s/{theirs}"]) for step in steps if f"timing_s/{theirs}" in step]
        if values:
            found[phase] = round(statistics.median(values), 3)
    tokens = options.batch * (options.prompt + options.response)
    rate = {"tokens_per_second": round(tokens / found["step"])} if "step" in found else {}
    return {"steps": len(steps), **found, **rate}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--side", choices=["ours", "verl", "both"], default="both")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for each side")
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/slipway-logs"))
    parser.add_argument("--verl", type=Path, default=Path("/tmp/rig"), help="directory with verl_ppo.sh")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    results = Results(options.out, "ppo_step")
    job = write_job(options.jobs / f"{options.shape}-{options.prompt}", options.shape, options.prompt)
    for side, measure in (("ours", ours), ("verl", verl)):
        if options.side not in (side, "both"):
            continue
        job_of = {name: getattr(options, name) for name in ("shape", "batch", "prompt", "response")}
        try:
            results.add(side=side, **job_of, overrides=options.overrides, **measure(job, options))
        except subprocess.TimeoutExpired:
            results.add(side=side, **job_of, error=f"no end within {options.timeout:g} s")


if __name__ == "__main__":
    main()
