"""Wait until a Ray cluster has so many nodes, then say their GPUs: `gcs.py HOST:PORT COUNT`, run by `ray_node`.

A process of its own, as importing Ray takes a second and its client blocks for as long as the cluster does not answer.
The caller's deadline ends it.
"""

import json
import sys
import time

from ray._raylet import GcsClient

_INTERVAL = 0.2
"""Seconds between two questions; Ray offers nothing to wait for here."""
_ALIVE = 0  # rpc::GcsNodeInfo::ALIVE


def wait_for_nodes(address: str, count: int) -> dict[str, int]:
    """The GPUs of each host, as Ray counts them."""
    client = GcsClient(address=address)
    while True:
        nodes = client.get_all_node_info(timeout=5)
        alive = [node for node in nodes.values() if node.state == _ALIVE]
        if len(alive) >= count:
            gpus: dict[str, int] = {}
            for node in alive:
                host = node.node_manager_hostname
                gpus[host] = gpus.get(host, 0) + int(node.resources_total.get("GPU", 0))
            return gpus
        time.sleep(_INTERVAL)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(wait_for_nodes(sys.argv[1], int(sys.argv[2]))) + "\n")
