"""Whole PPO steps of this trainer, by `benchmarks.gpu.step`: tuned against untuned, one GPU against two.

Untuned is this trainer with its features off (`FEATURES_OFF`): eight rows per micro-batch, activations recomputed,
layers not compiled, log-probs from the engine. vLLM keeps its defaults on both sides, CUDA graphs among them, and the
rows stay packed, which no setting changes. The second GPU gets the same batch as the first alone.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.session import CACHE, COPIES
from benchmarks.results import read_rows

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 330  # seconds for one side
FIGURES = ("step", "generate", "update_actor", "update_critic", "tokens_per_second", "gpu_utilization", "all_steps")
FEATURES_OFF = [
    *(
        f"{role}.{setting}"
        for role in ("actor", "critic")
        for setting in (
            "micro_batch_tokens=null",
            "micro_batch_size=8",
            "activation_checkpointing=true",
            "compile=false",
            "share_prompts=false",
        )
    ),
    "trainer.bind_cores=false",
]


def tuning(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second and GPU utilisation of a step, generation included."""
    features = [] if options.cpu else CACHE.format(8).split()
    return {
        "job": f"PPO, {_job(options)}",
        "untuned": FEATURES_OFF,
        "baseline": _step(options, "untuned", FEATURES_OFF),
        "ours": _step(options, "tuned", features),
    }


def two_gpus(options: argparse.Namespace) -> dict[str, Any]:
    """A step on one GPU and on two, with the settings that are chosen for each."""
    copies = COPIES.split() if options.shape == "0.5B" else []  # a larger model's ranks share it, as by default
    return {
        "job": f"PPO, {_job(options)}",
        "baseline": _step(options, "one-gpu", [], tokens=0),
        "ours": _step(options, "two-gpus", copies, gpus=2, tokens=0),
    }


def _sizes(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Prompts, tokens of a prompt, most tokens of a response, and the end tokens that make their lengths vary."""
    return (16, 64, 32, 20) if options.cpu else (512, 256, 512, 300)


def _job(options: argparse.Namespace) -> str:
    prompts, prompt, response, _ = _sizes(options)
    return f"{prompts} prompts of {prompt} tokens, responses of up to {response}, lengths vary"


def _step(
    options: argparse.Namespace, name: str, settings: list[str], gpus: int = 1, tokens: int = 32768
) -> dict[str, Any]:
    """The medians of a run of some steps without the first. Raises RuntimeError if no step ended."""
    prompts, prompt, response, ends = _sizes(options)
    sizes = {"batch": prompts, "prompt": prompt, "response": response, "end-tokens": ends}
    limits = {"gpus": gpus, "tokens": tokens, "steps": 4, "timeout": TIMEOUT}
    with tempfile.TemporaryDirectory(prefix="slipway-claims-") as directory:
        rows = Path(directory) / "rows.jsonl"
        names = {"name": name, "shape": options.shape, "side": "ours"}
        places = {"jobs": options.jobs, "logs": options.logs, "out": rows}
        command = [sys.executable, "-m", "benchmarks.gpu.step"]
        command += [
            text for key, value in (names | sizes | limits | places).items() for text in (f"--{key}", str(value))
        ]
        subprocess.run([*command, *["--cpu"] * options.cpu, *settings], cwd=ROOT, check=True)
        (row,) = read_rows(rows)
    if "step" not in row:
        raise RuntimeError(f"no step of {name} ended: see {options.logs}/ours-{name}.log")
    return {figure: row[figure] for figure in FIGURES if figure in row}
