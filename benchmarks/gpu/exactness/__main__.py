"""Whether log-probs of vLLM's engine and of a trainer from the same operators are equal to the bit, and at what cost.

    python -m benchmarks.gpu.exactness --shape 1.5B [--only NAME…] --out FILE
    python -m benchmarks.gpu.exactness --cpu --out FILE     # rehearses without a GPU, with formulas and a tiny model

Each part is a process of its own:

- `census`: which operators of vLLM, torch and this benchmark give the same bits for any number of rows
- `tiles`, `cublas`: an engine in batch-invariant mode that shares its operators, with products by vLLM's kernel or by
  cuBLAS without split-K, beside a forward pass from them: three workloads, a trace operator by operator, its speed
- `step`: milliseconds of forward and backward passes, and errors of gradients, by these operators and by the trainer
- `today`: the speed of an engine as the trainer runs it
- `stock`, unless left out: the speed of vLLM's batch-invariant mode as it is
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, alone, arguments
from benchmarks.gpu.exactness import engine
from benchmarks.gpu.exactness.census import Census
from benchmarks.gpu.exactness.forward import save_peaked_model
from benchmarks.gpu.exactness.step import Steps
from trainer.rollout.process_environment import engine_environment

ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", **engine_environment(enforce_eager=False)}
# vLLM also compiles functions outside of the model, and compiled ones may give other bits.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Part:
    """`limit` is in seconds."""

    limit: float
    variables: Mapping[str, str] = field(default_factory=dict)
    needs_gpu: bool = False


PARTS = {
    "census": Part(60, {"VLLM_BATCH_INVARIANT": "1"}, needs_gpu=True),
    "tiles": Part(90, INVARIANT),
    "cublas": Part(90, INVARIANT, needs_gpu=True),
    "step": Part(110),
    "today": Part(150),
    "stock": Part(90, INVARIANT, needs_gpu=True),
}
DEFAULT = ("census", "tiles", "cublas", "step", "today")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=SHAPES, help="1.5B if not given, tiny with --cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME")
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.shape = options.shape or ("tiny" if options.cpu else "1.5B")
    model = options.jobs / f"{options.shape}-exactness" / "model"
    if options.one:
        run(options.one, options, model)
        return
    if not (model / "config.json").exists():
        alone(save_peaked_model, options.shape, model, "cpu" if options.cpu else "cuda")
    results = Results(options.out, "exactness")
    chosen = options.only or [name for name in DEFAULT if not (options.cpu and PARTS[name].needs_gpu)]
    for name in chosen:
        if (error := in_process(name, options)) is not None:
            results.add(part=name, shape=options.shape, error=error)


class PartResults(Results):
    """Rows that say which part they are of."""

    def __init__(self, path: Path, part: str, shape: str) -> None:
        super().__init__(path, "exactness")
        self._origin = {"part": part, "shape": shape}

    def add(self, **row: Any) -> None:
        super().add(**self._origin, **row)


def run(name: str, options: argparse.Namespace, model: Path) -> None:
    device = "cpu" if options.cpu else "cuda"
    results = PartResults(options.out, name, options.shape)
    if name == "census":
        Census(SHAPES[options.shape], results).take()
    elif name == "step":
        Steps(options.shape, model, device, results).take()
    else:
        engine.measure(name, options.shape, model, device, results)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine takes seconds to shut down


def in_process(name: str, options: argparse.Namespace) -> str | None:
    """Runs a part, which writes its rows. Returns what went wrong."""
    command = [sys.executable, "-m", "benchmarks.gpu.exactness", "--one", name, f"--out={options.out}"]
    command += [f"--shape={options.shape}", f"--jobs={options.jobs}", *(["--cpu"] if options.cpu else [])]
    variables = {} if options.cpu else PARTS[name].variables
    process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, **variables}, start_new_session=True)
    limit = PARTS[name].limit * (10 if options.cpu else 1)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done in {limit:.0f} s"
    return f"exit {code}" if code else None


if __name__ == "__main__":
    main()
