"""Weights from the actor to an engine: on one GPU the sync alone and the cycle of sleep, update, wake; else by NCCL.

    python -m benchmarks.gpu.weights --shape 1.5B [--repeats 5]            # actor and engine share a GPU
    python -m benchmarks.gpu.weights --shape 1.5B [--repeats 5] --split    # each has one of its own

Runs the trainer's own workers on Ray; each sync is checked by the sum of the weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.gpu.common import SHAPES, Results, arguments, timed, write_job
from benchmarks.gpu.weights.timed_factories import make_timed_actor, make_timed_rollout

if TYPE_CHECKING:
    from trainer.cluster.nodes import Slot
    from trainer.cluster.place import RankPlace, Team
    from trainer.cluster.workers import WorkerGroup
    from trainer.config.tree import Config
    from trainer.roles.actor import ActorWorker
    from trainer.roles.rollout import RolloutWorker

Actor = TypeVar("Actor", bound="ActorWorker")
Rollout = TypeVar("Rollout", bound="RolloutWorker")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--split", action="store_true", help="the actor on one GPU and the engine on another")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    options = parser.parse_args()
    job = write_job(options.jobs / f"{options.shape}-256", options.shape, 256)

    from trainer.cluster.connection import connected
    from trainer.cluster.nodes import find_nodes, reserve_slots
    from trainer.config.tree import Config
    from trainer.roles.factories import make_actor, make_rollout

    config = Config.model_validate(
        {
            "model": {"path": job / "model", "dtype": "float32" if options.cpu else "bfloat16"},
            "data": {"max_prompt_length": 256, "max_response_length": 256},
            "rollout": {
                "kv_cache_gib": 0.2 if options.cpu else 16.0,
                "max_num_seqs": 256,
                "weight_transfer": "broadcast" if options.split else "auto",
            },
        }
    )
    places = 2 if options.split else 1
    gpus = 0 if options.cpu else places
    results = Results(options.out, "weights")
    with connected():
        nodes = find_nodes(1, gpus)
        slots = reserve_slots(nodes if gpus else nodes * places, gpus, 300)
        if options.split:
            from benchmarks.gpu.weights.split import measure, measure_latecomer

            actor, rollout = start(config, make_timed_actor, make_timed_rollout, slots[0], slots[1], job)
            results.add(shape=options.shape, **measure(actor, rollout, config, options.repeats))
            results.add(shape=options.shape, **measure_latecomer(actor, rollout))
        else:
            actor, rollout = start(config, make_actor, make_rollout, slots[0], slots[0], job)
            row = measure_shared(actor, rollout, config, options.repeats, with_parts=not options.cpu)
            results.add(shape=options.shape, **row)


def start(
    config: Config,
    make_actor: Callable[[Config, RankPlace], Actor],
    make_rollout: Callable[[Config, RankPlace, Team], Rollout],
    for_actor: Slot,
    for_engine: Slot,
    job: Path,
) -> tuple[WorkerGroup[Actor], WorkerGroup[Rollout]]:
    """An actor and an engine."""
    from trainer.runs.workers import connect_ranks, start_engines, start_group

    rollout = start_engines(make_rollout, config, [for_engine])
    actor = start_group("actor", make_actor, config, {"actor": [for_actor]})
    connect_ranks([actor], job, run_steps=1, timeout=300)
    return actor, rollout


def measure_shared(
    actor: WorkerGroup[ActorWorker], rollout: WorkerGroup[RolloutWorker], config: Config, repeats: int, with_parts: bool
) -> dict[str, Any]:
    """Median seconds of a sync on a shared GPU, its parts, and the cycle around it."""
    from trainer.roles.actor import ActorWorker
    from trainer.roles.rollout import RolloutWorker
    from trainer.rollout.engines import Engines
    from trainer.weights.buckets import SharedPart

    engines = Engines(rollout, actor, config, on_shared_gpus=with_parts)
    first = timed(engines.start)
    alone = [timed(engines.sync_weights) for _ in range(repeats)]
    nbytes = engines.sync_weights()["rollout/synced_bytes"]
    parts: dict[str, list[float]] = {}
    for _ in range(repeats if with_parts else 0):
        part, seconds = SharedPart((), ends=False), Counter[str]()
        while not part.ends:
            begins = not seconds
            begin = time.perf_counter()
            (part,) = actor.call(ActorWorker.share_weights, begins)
            seconds["share"] += time.perf_counter() - begin
            seconds["copy"] += timed(partial(rollout.call, RolloutWorker.copy_weights, part, begins))
        seconds["release"] = timed(partial(actor.call, ActorWorker.release_weights))
        for name, value in seconds.items():
            parts.setdefault(name, []).append(value)
    cycles = [(timed(partial(rollout.call, RolloutWorker.sleep)), timed(engines.sync_weights)) for _ in range(repeats)]
    asleep, awake = sorted(cycles, key=sum)[len(cycles) // 2]
    return {
        "gib": round(nbytes / 2**30, 2),
        "first_seconds": round(first, 3),
        "sync_seconds": round(median(alone), 4),
        "parts": {name: round(median(values), 4) for name, values in parts.items()},
        "sleep_seconds": round(asleep, 4),
        "wake_and_sync_seconds": round(awake, 4),
        "cycle_seconds": round(asleep + awake, 4),
    }


if __name__ == "__main__":
    main()
