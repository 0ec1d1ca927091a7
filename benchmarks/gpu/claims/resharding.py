"""Weights from the actor's ranks to the engines, beside gathering and loading the whole state dict.

The baseline: torch's `get_model_state_dict` with `full_state_dict` and `cpu_offload`, as its FSDP2 guide saves a model;
the first rank converts it to the engines' type and hands it over in Ray's object store, without pickling the tensors;
each engine reads it there and loads it with vLLM's `load_weights`. Bytes are those that gathering leaves in the actor,
and those that each engine receives. Both sides use the trainer's own workers, one rank and one engine per GPU; on a CPU
two of each, so that weights are really sharded.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.claims.gathering import make_gathering_actor, make_loading_rollout
from benchmarks.gpu.common import timed, write_job

if TYPE_CHECKING:
    from benchmarks.gpu.claims.gathering_workers import GatheringActor, LoadingRollout
    from trainer.cluster.workers import WorkerGroup


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from trainer.cluster.connection import connected
    from trainer.cluster.nodes import find_nodes, reserve_slots
    from trainer.config.tree import Config
    from trainer.rollout.engines import Engines
    from trainer.runs.workers import connect_ranks, start_engines, start_group

    job = write_job(options.jobs / f"{options.shape}-256-0", options.shape, 256)
    config = Config.model_validate(
        {
            "model": {"path": job / "model", "dtype": "bfloat16"},
            "data": {"max_prompt_length": 256, "max_response_length": 256},
            "rollout": {"kv_cache_gib": 0.1 if options.cpu else 8.0, "max_num_seqs": 64},
        }
    )
    gpus = 0 if options.cpu else min(2, torch.cuda.device_count())
    with connected():
        nodes = find_nodes(1, gpus)
        slots = reserve_slots(nodes if gpus else nodes * 2, gpus, 300)
        rollout = start_engines(make_loading_rollout, config, slots)
        actor = start_group("actor", make_gathering_actor, config, {"actor": slots})
        connect_ranks([actor], job, run_steps=1, timeout=300)
        engines = Engines(rollout, actor, config, on_shared_gpus=not options.cpu)
        engines.start()
        ours = [timed(engines.sync_weights) for _ in range(options.repeats + 1)][1:]
        handed = int(engines.sync_weights()["rollout/synced_bytes"])
        gathered = gather_and_load(actor, rollout)  # a warm-up
        theirs = [timed(partial(gather_and_load, actor, rollout)) for _ in range(options.repeats)]
    return {
        "job": f"{len(slots)} ranks and engines, weights by {engines.transport[0]}",
        "baseline": _figures(theirs, *gathered),
        # Buckets hold what is handed over, in the engines' type.
        "ours": _figures(ours, handed, handed),
    }


def gather_and_load(actor: WorkerGroup[GatheringActor], rollout: WorkerGroup[LoadingRollout]) -> tuple[int, int]:
    """The baseline's sync; the bytes that it gathered and handed over."""
    from benchmarks.gpu.claims.gathering_workers import GatheringActor, LoadingRollout

    weights, gathered = actor.call(GatheringActor.gather_everything)[0]
    return gathered, rollout.call(LoadingRollout.load_everything, weights)[0]


def _figures(seconds: list[float], gathered: int, handed: int) -> dict[str, float]:
    return {
        "seconds": round(median(seconds), 4),
        "mib": round((gathered + handed) / 2**20, 2),
        "gathered_mib": round(gathered / 2**20, 2),
        "handed_mib": round(handed / 2**20, 2),
    }
