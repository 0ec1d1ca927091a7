"""Measures published claims, each beside its baseline on the same machine. measured/claims.md explains the baselines.

    python -m benchmarks.gpu.claims [--only generation resharding …] [--shape 0.5B] [--cpu]
    python -m benchmarks.gpu.claims.page [FILE_OR_DIRECTORY…]    # puts the rows into measured/claims.md

One that fails leaves a row with its error, and the next begins. `two_gpus` needs two GPUs.
"""

import argparse
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.claims import generation, loading, passes, resharding, steps
from benchmarks.gpu.claims.published import MEASUREMENTS
from benchmarks.gpu.common import SHAPES, Results, arguments

logger = logging.getLogger("claims")

MEASURE: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "generation": generation.measure,
    "resharding": resharding.measure,
    "tuning": steps.tuning,
    "forward": passes.forward,
    "loading": loading.measure,
    "critic": passes.critic,
    "two_gpus": steps.two_gpus,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=[])
    parser.add_argument("--shape", choices=SHAPES, help="0.5B if not given, tiny with --cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/slipway-logs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU, with small sizes")
    options = parser.parse_args()
    options.shape = options.shape or ("tiny" if options.cpu else "0.5B")
    options.logs.mkdir(parents=True, exist_ok=True)
    enough = torch.cuda.device_count() >= 2
    if "two_gpus" in options.only and not enough:
        parser.error(f"two_gpus needs two GPUs, and this host has {torch.cuda.device_count()}")
    chosen = options.only or [name for name in MEASUREMENTS if enough or name != "two_gpus"]
    results = Results(options.out, "claims")
    for name in chosen:
        try:
            measured = MEASURE[name](options)
        except Exception as error:
            logger.exception("%s", name)
            measured = {"error": f"{type(error).__name__}: {error}"}
        results.add(claim=name, shape=options.shape, cores=os.cpu_count(), **measured)


if __name__ == "__main__":
    main()
