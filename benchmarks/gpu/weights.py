"""From the actor to an engine on the same GPU: the sync alone, and the whole sleep, update, wake.

    python -m benchmarks.gpu.weights --shape 1.5B [--repeats 5]

Runs the trainer's own workers on Ray; each sync is checked by the sum of the weights.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, arguments, write_job


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    options = parser.parse_args()
    job = write_job(options.jobs / f"{options.shape}-256", options.shape, 256)

    from trainer import cluster
    from trainer.cluster import WorkerGroup
    from trainer.config import Config
    from trainer.roles.place import Place
    from trainer.rollout.engines import Engines
    from trainer.workers import GPU_SHARES, ROLES, worker_environment

    config = Config.model_validate(
        {
            "model": {"path": job / "model", "dtype": "float32" if options.cpu else "bfloat16"},
            "data": {"max_prompt_length": 256, "max_response_length": 256},
            "rollout": {"kv_cache_gib": 0.2 if options.cpu else 16.0, "max_num_seqs": 256},
        }
    )
    results = Results(options.out, "weights")
    with cluster.connected():
        nodes = cluster.find_nodes(1, 0 if options.cpu else 1)
        slot = cluster.reserve_slots(nodes, 0 if options.cpu else 1, 300)[0]
        place = Place(0, 1, slot.node.address, slot.device)
        groups = {role: WorkerGroup(role, 300) for role in ("rollout", "actor")}
        for role, group in groups.items():
            environment = worker_environment(config, slot)
            group.add(slot, ROLES[role], [config, place], environment, GPU_SHARES[role])
        actor, rollout = groups["actor"], groups["rollout"]
        port = actor.call("open_store")[0]
        actor.call("setup", slot.node.address, port, job)

        def timed(action: Any) -> float:
            start = time.perf_counter()
            action()
            return time.perf_counter() - start

        engines = Engines(rollout, actor, config, on_shared_gpus=not options.cpu)
        first = timed(engines.start)
        sync = engines.sync_weights
        alone = sorted(timed(sync) for _ in range(options.repeats))
        parts: dict[str, list[float]] = {}
        for _ in range(options.repeats if not options.cpu else 0):
            start = time.perf_counter()
            shared = actor.call("share_weights")[0]
            parts.setdefault("share", []).append(time.perf_counter() - start)
            parts.setdefault("copy", []).append(timed(partial(rollout.call, "copy_weights", shared)))
            parts.setdefault("release", []).append(timed(partial(actor.call, "release_weights")))
        cycles = []
        for _ in range(options.repeats):
            asleep = timed(lambda: rollout.call("sleep"))
            cycles.append((asleep, timed(sync)))
        cycle = sorted(cycles, key=sum)[len(cycles) // 2]
        shape = SHAPES[options.shape]
        weights = shape.layer_parameters + shape.hidden * shape.vocabulary * (1 if shape.tied else 2)
        results.add(
            shape=options.shape,
            gib=round(weights * 2 / 2**30, 2),
            first_seconds=round(first, 3),
            sync_seconds=round(alone[len(alone) // 2], 4),
            parts={name: round(sorted(values)[len(values) // 2], 4) for name, values in parts.items()},
            sleep_seconds=round(cycle[0], 4),
            wake_and_sync_seconds=round(cycle[1], 4),
            cycle_seconds=round(sum(cycle), 4),
        )


if __name__ == "__main__":
    main()
