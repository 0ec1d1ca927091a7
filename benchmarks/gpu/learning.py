"""A model of 0.1B parameters learns to carry: warm start, then PPO with vLLM on the same GPU.

python -m benchmarks.gpu.learning [--output DIR] [--actor-rate 2e-5] [--seed 0]      the run, on a host with a GPU
python -m benchmarks.gpu.learning --draw DIR/ppo/metrics.jsonl --figure benchmarks/measured/learning_on_gpu.svg
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.algorithms import trainer
from benchmarks.gpu.common import Results, arguments, timed
from benchmarks.results import read_rows

ROOT = Path(__file__).resolve().parents[2]
# 12 layers of width 768, 106 million parameters.
MODEL = ("layers=12", "hidden_size=768", "learning_rate=4e-4", "batch_size=128", "steps=300", "test_freq=100")
POLICY = (
    "model.dtype=bfloat16",
    "data.train_batch_size=128",
    "data.max_prompt_length=64",
    "actor.micro_batch_tokens=16384",
    "critic.micro_batch_tokens=16384",
    "rollout.kv_cache_gib=4",
    "rollout.max_num_seqs=1024",
    "trainer.total_steps=80",
    "trainer.test_freq=2",
    "trainer.stop_at=0.995",
    "trainer.save_freq=0",
)
SMALL = ("layers=2", "hidden_size=128", "steps=60", "test_freq=60")
SHORT = ("model.dtype=float32", "trainer.total_steps=2", "rollout.kv_cache_gib=0.3")


def learn(options: argparse.Namespace) -> dict[str, Any]:
    output = options.output.absolute()
    data, model = output / "data", output / "warm-start"
    files = [f"{kind}_files={data}/{name}.parquet" for kind, name in (("train", "train"), ("validation", "validation"))]
    trainer("data", "arithmetic", "--output", str(data), "--seed", str(options.seed))
    warm_start = partial(
        trainer,
        "sft",
        f"train_files={data}/demonstrations.parquet",
        files[1],
        f"output={model}",
        f"seed={options.seed}",
        *(MODEL + SMALL if options.cpu else MODEL),
    )
    ppo = partial(
        trainer,
        "train",
        *(f"data.{file}" for file in files),
        f"model.path={model}",
        f"trainer.output_dir={output}",
        "trainer.run_id=ppo",
        f"trainer.seed={options.seed}",
        f"actor.learning_rate={options.actor_rate}",
        f"critic.learning_rate={5 * options.actor_rate}",
        *(POLICY + SHORT if options.cpu else POLICY),
    )
    seconds = {"warm_start_seconds": round(timed(warm_start)), "ppo_seconds": round(timed(ppo))}
    steps, matches = curve(output / "ppo" / "metrics.jsonl", "validation/exact_match")
    _, differences = curve(output / "ppo" / "metrics.jsonl", "rollout/log_prob_difference_mean")
    return {
        "before": round(matches[0], 3),
        "after": round(matches[-1], 3),
        "steps": steps[-1],
        **seconds,
        "largest_mean_log_prob_difference": round(max(differences), 5),
    }


def curve(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """The steps at which a metric was measured, and its values."""
    rows = [row for row in read_rows(metrics) if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def draw(metrics: Path, figure: Path) -> None:
    """Reward of the samples, and greedy exact match on held-out questions."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 3.2), layout="constrained")
    axes = drawing.subplots()
    axes.plot(*curve(metrics, "reward/mean"), label="reward, sampled", linewidth=1)
    axes.plot(*curve(metrics, "validation/exact_match"), marker=".", label="exact match, greedy, held-out")
    axes.set(xlabel="PPO step", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    drawing.savefig(figure, metadata={"Date": None})


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", type=Path, default=Path("runs/learning-on-gpu"))
    parser.add_argument("--actor-rate", type=float, default=2e-5, help="learning rate; the critic's is five times it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=Path, metavar="METRICS", help="draw the curve of a run instead")
    parser.add_argument("--figure", type=Path, default=ROOT / "benchmarks" / "measured" / "learning_on_gpu.svg")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU: a small model, two steps")
    options = parser.parse_args()
    if options.draw:
        draw(options.draw, options.figure)
        return
    Results(options.out, "learning").add(seed=options.seed, actor_rate=options.actor_rate, **learn(options))


if __name__ == "__main__":
    main()
