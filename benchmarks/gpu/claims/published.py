"""The claims, and how a figure of one side relates to that of the other."""

from collections.abc import Callable
from dataclasses import dataclass


def times(baseline: float, ours: float) -> str:
    return f"{ours / baseline:.2f} times"


def change(baseline: float, ours: float) -> str:
    return f"{100 * (ours / baseline - 1):+.0f} %"


def shares(baseline: float, ours: float) -> str:
    return f"{100 * baseline:.0f} → {100 * ours:.0f} %"


@dataclass(frozen=True)
class Claim:
    """One published figure.

    `measurement` is the module that measures it, `figure` its name in the rows, `unit` as the page shows it.
    """

    measurement: str
    title: str
    figure: str
    unit: str
    relation: Callable[[float, float], str]
    claimed: str


CLAIMS = (
    Claim("generation", "vLLM samples faster than Transformers", "tokens_per_second", "tokens/s", times, "≥ 3 times"),
    Claim("resharding", "Weights, actor to engine: time", "seconds", "s", change, "-60 %"),
    Claim("resharding", "Weights, actor to engine: bytes", "mib", "MiB", change, "-60 %"),
    Claim("tuning", "A tuned step, generation included", "tokens_per_second", "tokens/s", times, "≥ 2.16 times"),
    Claim("tuning", "GPU utilisation of that step", "gpu_utilization", "", shares, "58 → ≥ 94 %"),
    Claim("forward", "The actor's forward pass", "seconds", "s", change, "-55 %"),
    Claim("loading", "Loading a batch of prompts", "milliseconds", "ms", change, "-87 %"),
    Claim("loading", "… and from the start to the first batch", "first_batch_seconds", "s", change, "no claim"),
    Claim("critic", "The critic's update: time", "seconds", "s", change, "-28 %"),
    Claim("critic", "The critic's update: memory", "gib", "GiB", change, "-35 %"),
    Claim("two_gpus", "A second GPU, same batch: throughput", "tokens_per_second", "tokens/s", change, "+91.7 %"),
    Claim("two_gpus", "A second GPU, same batch: step", "step", "s", change, "-44.9 %"),
)
MEASUREMENTS = tuple(dict.fromkeys(claim.measurement for claim in CLAIMS))
