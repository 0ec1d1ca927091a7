"""Wait until a Ray cluster has so many nodes: `gcs.py HOST:PORT COUNT`, run as a program by `ray_node`.

A process of its own, as importing Ray takes a second and its client blocks for as long as the cluster does not answer.
The caller's deadline ends it.
"""

import sys
import time

from ray._raylet import GcsClient

_INTERVAL = 0.2
"""Seconds between two questions; Ray offers nothing to wait for here."""
_ALIVE = 0  # rpc::GcsNodeInfo::ALIVE


def wait_for_nodes(address: str, count: int) -> None:
    client = GcsClient(address=address)
    while True:
        nodes = client.get_all_node_info(timeout=5)
        if sum(node.state == _ALIVE for node in nodes.values()) >= count:
            return
        time.sleep(_INTERVAL)


if __name__ == "__main__":
    wait_for_nodes(sys.argv[1], int(sys.argv[2]))
