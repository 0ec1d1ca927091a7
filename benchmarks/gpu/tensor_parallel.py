"""An engine that spans several GPUs: generation against vLLM alone, the sync of its weights, and log-probs that agree.

    python -m benchmarks.gpu.tensor_parallel --shape 7B [--size 2] [--parts vllm engine sync agreement]

Each part appends a row. `vllm` is vLLM's own `LLM` over as many GPUs, as benchmarks/gpu/rollout.py runs it. The rest
uses the trainer's own workers on Ray, the actor sharded over the GPUs of the engine. The link is a plain broadcast of
as many bytes between two of these GPUs, over NCCL; without GPUs all this goes over gloo and shared memory.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.common import SHAPES, Results, arguments, timed, write_job
from benchmarks.gpu.rollout import running
from benchmarks.gpu.weights.split import Timed, TimedActor, TimedRollout
from benchmarks.gpu.weights.timed_factories import make_timed_actor, make_timed_rollout
from trainer.cluster.calls import task

if TYPE_CHECKING:
    from trainer.cluster.workers import WorkerGroup
    from trainer.config.tree import Config
    from trainer.rollout.engines import Engines

PARTS = ("vllm", "engine", "sync", "agreement")
AGREEMENT_RESPONSES = 64
AGREEMENT_TOKENS = 128


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--size", type=int, default=2, help="GPUs of the engine")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-cache-gib", type=float, default=24.0, help="per GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without GPUs")
    options = parser.parse_args()
    results = Results(options.out, "tensor_parallel")
    started = time.perf_counter()
    options.job = write_job(options.jobs / f"{options.shape}-{options.prompt}", options.shape, options.prompt)
    results.add(part="job", seconds=round(time.perf_counter() - started, 1))
    prompts = random_prompts(options)
    baseline: dict[bool, float] = {}
    if "vllm" in options.parts:
        baseline = measure_vllm(options, prompts, results)
    if set(options.parts) & {"engine", "sync", "agreement"}:
        measure_trainer(options, prompts, baseline, results)


def random_prompts(options: argparse.Namespace) -> list[list[int]]:
    generator, vocabulary = random.Random(0), SHAPES[options.shape].vocabulary
    return [[generator.randrange(300, vocabulary) for _ in range(options.prompt)] for _ in range(options.prompts)]


def measure_vllm(options: argparse.Namespace, prompts: list[list[int]], results: Results) -> dict[bool, float]:
    """Adds vLLM's own rows and returns its best seconds, with and without log-probs."""
    options.tensor_parallel = options.size
    started = time.perf_counter()
    best = {}
    with running(["offline"], options) as (engine,):
        results.add(part="vllm", start_up_seconds=round(time.perf_counter() - started, 1))
        for log_probs in (True, False):
            times = []
            for _ in range(options.repeats):
                engine.send((prompts, options.response, log_probs, None))
                seconds, tokens = engine.recv()
                times.append(seconds)
            best[log_probs] = min(times)
            results.add(**generation(options, "vllm", log_probs, times, tokens))
    return best


def generation(
    options: argparse.Namespace, part: str, log_probs: bool, times: list[float], tokens: int, **more: Any
) -> dict[str, Any]:
    return {
        "part": part,
        "shape": options.shape,
        "size": options.size,
        "log_probs": log_probs,
        "prompts": options.prompts,
        "prompt": options.prompt,
        "response": options.response,
        "seconds": round(min(times), 3),
        "all_seconds": [round(value, 3) for value in times],
        "tokens_per_second": round(tokens / min(times)),
        **more,
    }


def measure_trainer(
    options: argparse.Namespace, prompts: list[list[int]], baseline: dict[bool, float], results: Results
) -> None:
    """Starts the trainer's workers and adds the rows of all other parts."""
    from trainer.cluster.connection import connected
    from trainer.cluster.nodes import find_nodes, reserve_slots
    from trainer.rollout.engines import Engines
    from trainer.runs.workers import connect_ranks, start_engines, start_group

    config = settings(options)
    gpus = 0 if options.cpu else options.size
    with connected():
        slots = reserve_slots(find_nodes(1, gpus), gpus, 300)
        started = time.perf_counter()
        rollout = start_engines(make_timed_rollout, config, slots)
        # On CPU the actor's ranks share the only slot, as the engine's do.
        actor = start_group("actor", make_timed_actor, config, {"actor": slots if gpus else slots * options.size})
        connect_ranks([actor], options.job, run_steps=1, timeout=600)
        results.add(part="actor", start_up_seconds=round(time.perf_counter() - started, 1))
        rollout.call(TimedRollout.chosen)
        results.add(part="engine", start_up_seconds=round(time.perf_counter() - started, 1))
        engines = Engines(rollout, actor, config, on_shared_gpus=gpus > 0)

        def agree(weights: str) -> None:
            if "agreement" in options.parts:
                results.add(part="agreement", weights=weights, **agreement(rollout, actor, prompts))

        agree("not synced")
        first = timed(engines.start)
        agree("synced")
        if "sync" in options.parts:
            results.add(**measure_sync(options, engines, rollout, actor, first))
        if "engine" in options.parts:
            for log_probs in (True, False):
                results.add(**measure_engine(options, rollout, prompts, log_probs, baseline.get(log_probs)))
        agree("after all")


def settings(options: argparse.Namespace) -> Config:
    from trainer.config.tree import Config

    return Config.model_validate(
        {
            "model": {"path": options.job / "model", "dtype": "float32" if options.cpu else "bfloat16"},
            "data": {"max_prompt_length": options.prompt, "max_response_length": options.response},
            "actor": {"compile": False, "micro_batch_tokens": 16384},
            "rollout": {
                "tensor_parallel": options.size,
                "max_num_seqs": 1024,
                "kv_cache_gib": options.kv_cache_gib,
                "ignore_end_tokens": True,
            },
        }
    )


def agreement(
    rollout: WorkerGroup[TimedRollout], actor: WorkerGroup[TimedActor], prompts: list[list[int]]
) -> dict[str, float]:
    """How far the engine's log-probs are from the actor's for responses that the engine just sampled."""
    from trainer.algorithms.off_policy.agreement import log_prob_agreement
    from trainer.data.batches.batch import Batch
    from trainer.rollout.sampling import SamplingRequest
    from trainer.runs.passes import forward

    asked = [tuple(prompt) for prompt in prompts[:AGREEMENT_RESPONSES]]
    requests = [SamplingRequest(prompt, 1.0, seed=row, max_tokens=AGREEMENT_TOKENS) for row, prompt in enumerate(asked)]
    responses = rollout.call(TimedRollout.generate, requests)[0]
    log_probs = [response.log_probs for response in responses]
    batch = Batch.from_responses(asked, [response.token_ids for response in responses], log_probs)
    actor_log_probs = forward(actor, TimedActor.log_probs, batch)
    agreement_metrics = log_prob_agreement(batch.rollout_log_probs, actor_log_probs, batch.response_mask)
    return {
        **{name.removeprefix("rollout/"): round(value, 5) for name, value in agreement_metrics.items()},
        "actor_log_prob_mean": round(float(actor_log_probs[batch.response_mask].mean()), 3),
    }


def measure_sync(
    options: argparse.Namespace,
    engines: Engines,
    rollout: WorkerGroup[TimedRollout],
    actor: WorkerGroup[TimedActor],
    first: float,
) -> dict[str, Any]:
    """Median seconds of a sync, its parts, and their ratio to the link's time for the same bytes."""
    whole = [timed(engines.sync_weights) for _ in range(options.repeats + 2)][2:]
    nbytes = int(engines.sync_weights()["rollout/synced_bytes"])
    links = {kind: max(actor.call(TimedActor.link_within, kind, nbytes, 5)) for kind in ("broadcast", "all_gather")}
    parts: dict[str, list[float]] = {}
    for _ in range(0 if options.cpu else options.repeats):
        seconds, ends = Counter[str](), False
        while not ends:
            begins, begin = not seconds, time.perf_counter()
            shared = actor.call(Timed.timed, "share_weights", begins)
            seconds["share"] += time.perf_counter() - begin
            seconds["share_in_process"] += max(seconds_here for _, seconds_here in shared)
            begin = time.perf_counter()
            copied = rollout.call_each(task(Timed.timed, "copy_weights", part, begins) for part, _ in shared)
            seconds["copy"] += time.perf_counter() - begin
            seconds["copy_in_process"] += max(seconds_here for _, seconds_here in copied)
            ends = shared[0][0].ends
        seconds["release"] = timed(partial(actor.call, TimedActor.release_weights))
        for name, value in seconds.items():
            parts.setdefault(name, []).append(value)
    cycles = [(timed(engines.sleep), timed(engines.sync_weights)) for _ in range(options.repeats)]
    asleep, awake = sorted(cycles, key=sum)[len(cycles) // 2]
    sync, link = median(whole), links["broadcast"]
    return {
        "part": "sync",
        "shape": options.shape,
        "size": options.size,
        "transport": engines.transport[0],
        "bytes": nbytes,
        "first_seconds": round(first, 3),
        "sync_seconds": round(sync, 4),
        "all_seconds": [round(value, 4) for value in whole],
        "parts": {name: round(median(values), 4) for name, values in parts.items()},
        "link_seconds": {kind: round(value, 4) for kind, value in links.items()},
        "link_gb_per_second": round(nbytes / link / 1e9, 1),
        "sync_ratio": round(sync / link, 2),
        "sleep_seconds": round(asleep, 4),
        "wake_and_sync_seconds": round(awake, 4),
    }


def measure_engine(
    options: argparse.Namespace,
    rollout: WorkerGroup[TimedRollout],
    prompts: list[list[int]],
    log_probs: bool,
    alone: float | None,
) -> dict[str, Any]:
    """Seconds of a generation, in the engine's processes and with Ray's calls around it."""
    from trainer.rollout.sampling import SamplingRequest

    requests = [
        SamplingRequest(tuple(prompt), 1.0, seed=row, log_probs=log_probs) for row, prompt in enumerate(prompts)
    ]
    within, whole, tokens = [], [], 0
    for _ in range(options.repeats):
        begin = time.perf_counter()
        answers = rollout.call(Timed.timed, "generate", requests)
        whole.append(time.perf_counter() - begin)
        within.append(max(seconds for _, seconds in answers))
        tokens = sum(len(response.token_ids) for response in answers[0][0])
    more = {"with_ray_seconds": round(min(whole), 3)}
    if alone is not None:
        more |= {
            "share_of_vllm": round(alone / min(within), 3),
            "share_of_vllm_with_ray": round(alone / min(whole), 3),
        }
    return generation(options, "engine", log_probs, within, tokens, **more)


if __name__ == "__main__":
    main()
