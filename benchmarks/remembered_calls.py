"""What Ray's processes hold while the head remembers calls to actors, for benchmarks/measured/soak.md.

    docker run --rm --shm-size 1g -v $PWD:/src:ro -e PYTHONPATH=/src -e RAY_task_events_max_num_task_in_gcs=10000 \\
        slipway:cpu -- python -m benchmarks.remembered_calls [--calls 107000] [--rate 150]

Prints calls, and MiB of GCS and raylet, every 10 s. A call carries 100 bytes.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import ray

from tests.soak.samples import memory

WORKERS = 8
SECONDS = 10.0
PROCESSES = ("gcs_server", "raylet")


@ray.remote(num_cpus=0)
class Worker:
    def take(self, value: bytes) -> int:
        return len(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=107_000)
    parser.add_argument("--rate", type=float, default=150.0, help="calls a second")
    given = parser.parse_args()
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    workers = [Worker.remote() for _ in range(WORKERS)]
    began, shown, calls = time.monotonic(), 0.0, 0
    while calls < given.calls:
        ray.get([worker.take.remote(bytes(100)) for worker in workers])
        calls += WORKERS
        time.sleep(max(0.0, began + calls / given.rate - time.monotonic()))
        if time.monotonic() >= shown + SECONDS:
            shown = time.monotonic()
            held = ", ".join(f"{name} {memory(pid_of(name)):.0f} MiB" for name in PROCESSES)
            sys.stdout.write(f"{calls} calls: {held}\n")
            sys.stdout.flush()


def pid_of(name: str) -> int:
    """The process of this name, of which a container of one node has one."""
    (process,) = (path.parent for path in Path("/proc").glob("[0-9]*/comm") if path.read_text().strip() == name)
    return int(process.name)


if __name__ == "__main__":
    main()
