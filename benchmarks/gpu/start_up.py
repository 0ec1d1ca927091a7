"""From `launch` to the first training step, beside the start of a vLLM engine alone.

    python -m benchmarks.gpu.start_up --shape 0.5B [KEY=VALUE…]

Both are counted from the start of their process, imports included, twice: with empty caches of compiled kernels, which
each side has for itself, and with those that the first start left. KEY=VALUE are settings of the trainer.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, arguments, write_job
from benchmarks.results import read_rows
from entrypoints.host.child_environment import CACHE_DIR, CACHES

ROOT = Path(__file__).resolve().parents[2]


def measured(module: str, settings: list[str], caches: Path) -> dict[str, Any]:
    """The first row of one of these benchmarks, run with separate caches."""
    environment = {name: str(caches / folder) for name, folder in CACHES.items()} | {CACHE_DIR: str(caches)}
    with tempfile.TemporaryDirectory(prefix="slipway-start-up-") as directory:
        rows = Path(directory) / "rows.jsonl"
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *settings, "--out", str(rows)]
        subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)
        return read_rows(rows)[0]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    results = Results(options.out, "start_up")
    write_job(options.jobs / f"{options.shape}-256", options.shape, 256)
    # What both read from disk is in memory then.
    subprocess.run([sys.executable, "-c", "import ray, torch, transformers, vllm"], check=True)
    job = ["--shape", options.shape, "--response", "512", "--jobs", str(options.jobs), *["--cpu"] * options.cpu]
    with tempfile.TemporaryDirectory(prefix="slipway-caches-") as caches:
        for state in ("empty", "filled"):
            few = ["--engines", "0", "--repeats", "1", "--prompts", "8", "--kv-cache-gib", "4"]
            vllm = measured("rollout", [*job, *few], Path(caches) / "vllm")["start_up_seconds"]
            here = ["--side", "ours", "--launch", "--steps", "1", *options.overrides]
            ours = measured("ppo_step", [*job, *here], Path(caches) / "launch")["seconds_to_first_step"]
            results.add(shape=options.shape, caches=state, vllm=vllm, launch=ours, beyond=round(ours - vllm, 1))


if __name__ == "__main__":
    main()
