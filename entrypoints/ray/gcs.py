"""Wait until a Ray cluster has COUNT nodes and print the GPUs of each host: `gcs.py HOST:PORT COUNT`.

`ray.node` runs it as a process of its own: importing Ray takes a second, and its client blocks while the cluster does
not answer. A query that fails, as on a busy machine, is written to stderr and repeated. The caller's deadline ends it.
"""

import json
import sys
import time

from ray._raylet import GcsClient
from ray.exceptions import RpcError

_INTERVAL = 0.2
"""Seconds between two queries; Ray offers no event to wait for."""
_ALIVE = 0  # rpc::GcsNodeInfo::ALIVE


def wait_for_nodes(address: str, count: int) -> dict[str, int]:
    """The number of GPUs that Ray counts on each host, by host name.

    A node whose start was repeated is listed twice until Ray notices the end of its first start.
    """
    while True:
        try:
            nodes = GcsClient(address=address).get_all_node_info(timeout=5)
        except RpcError as error:
            sys.stderr.write(f"error: {error}\n")
            continue
        alive = [node for node in nodes.values() if node.state == _ALIVE]
        if len(alive) == count:
            gpus: dict[str, int] = {}
            for node in alive:
                host = node.node_manager_hostname
                gpus[host] = gpus.get(host, 0) + int(node.resources_total.get("GPU", 0))
            return gpus
        time.sleep(_INTERVAL)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(wait_for_nodes(sys.argv[1], int(sys.argv[2]))) + "\n")
