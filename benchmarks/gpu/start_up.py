"""From `launch` to the first training step and to its end, beside the start of a vLLM engine alone.

    python -m benchmarks.gpu.start_up --shape 0.5B [--sides launch] [KEY=VALUE…]

Both are counted from the start of their process, imports included, with caches of compiled kernels of their own: empty
at first, then filled by that start. A third start of `launch` has them as `buildkit warm` gives them to another
machine, in another directory. KEY=VALUE are settings of the trainer.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, arguments, write_job
from benchmarks.results import read_rows
from buildkit.warming.archive import packed_files
from entrypoints.host.child_environment import CACHE_DIR, CACHES
from entrypoints.host.starting_cache import COMPILED, copy_compiled

ROOT = Path(__file__).resolve().parents[2]


def measured(module: str, settings: list[str], caches: Path) -> dict[str, Any]:
    """The first row of one of these benchmarks, run with separate caches."""
    environment = {name: str(caches / folder) for name, folder in CACHES.items()} | {CACHE_DIR: str(caches)}
    with tempfile.TemporaryDirectory(prefix="slipway-start-up-") as directory:
        rows = Path(directory) / "rows.jsonl"
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *settings, "--out", str(rows)]
        subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)
        return read_rows(rows)[0]


def moved(caches: Path, target: Path) -> Path:
    """What an archive of `buildkit warm` holds of these caches, as `launch` copies it into `target`."""
    packed = target.with_name("packed")
    for name in packed_files(caches):
        (packed / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(caches / name, packed / name)
    for variable in COMPILED:
        copy_compiled(packed / CACHES[variable], target / CACHES[variable])
    return target


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--sides", nargs="+", choices=["vllm", "launch"], default=["vllm", "launch"])
    parser.add_argument(
        "--states", nargs="+", choices=["empty", "filled", "moved"], default=["empty", "filled", "moved"]
    )
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/slipway-logs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    results = Results(options.out, "start_up")
    write_job(options.jobs / f"{options.shape}-256-0", options.shape, 256)
    # What both read from disk is in memory then.
    subprocess.run([sys.executable, "-c", "import ray, torch, transformers, vllm"], check=True)
    job = ["--shape", options.shape, "--response", "512", "--jobs", str(options.jobs), *["--cpu"] * options.cpu]
    few = ["--engines", "0", "--repeats", "1", "--prompts", "8", "--kv-cache-gib", "4"]
    here = ["--side", "ours", "--launch", "--steps", "1", "--logs", str(options.logs)]
    with tempfile.TemporaryDirectory(prefix="slipway-caches-") as folder:
        caches = Path(folder)
        for state in options.states:
            row: dict[str, float] = {}
            if "vllm" in options.sides and state != "moved":
                row["vllm"] = measured("rollout", [*job, *few], caches / "vllm")["start_up_seconds"]
            if "launch" in options.sides:
                cache = moved(caches / "launch", caches / "moved") if state == "moved" else caches / "launch"
                first = measured("step", [*job, *here, "--name", f"start-{state}", *options.overrides], cache)
                row |= {
                    "launch": first["seconds_to_first_step"],
                    "first_step_ended": first["seconds_to_end_of_first_step"],
                }
            results.add(shape=options.shape, caches=state, **row)


if __name__ == "__main__":
    main()
