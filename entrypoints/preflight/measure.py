"""`launch preflight --speed` and `--network` run this program on the head of the cluster that they form.

It needs Ray and torch, which the images have.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from entrypoints.error_lines import cause
from entrypoints.preflight import network, speed

PREFLIGHT_FAILED = 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--output", type=Path, default=Path())
    arguments = parser.parse_args()
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerHostname"])
    if arguments.network and len(nodes) < 2:
        sys.stderr.write("error: the cluster has a single node, so there is no network to measure\n")
        return 2
    document: dict[str, Any] = {}
    failing: list[str] = []
    said: list[str] = []
    if arguments.speed:
        try:
            measured = speed.measure(nodes)
        except ray.exceptions.RayError as error:
            problem = cause(str(error), type(error).__name__)
            sys.stderr.write(f"error: the devices could not be measured: {problem}\n")
            return PREFLIGHT_FAILED
        document |= speed.document(measured)
        failing += document["slow"]
        said += speed.lines(measured.devices)
        for kind in ("slow", "health"):
            said += [f"{kind}: {host} {problem}" for host, problems in document[kind].items() for problem in problems]
    if arguments.network:
        pairs = network.measure(nodes)
        document["pairs"] = [asdict(pair) for pair in pairs]
        failing += [host for host in network.judge(pairs) if host not in failing]
        said += network.lines(pairs)
    document["failing_hosts"] = failing
    _write(arguments.output, document)
    sys.stdout.write((json.dumps(document, indent=2) if arguments.json else "\n".join(said)) + "\n")
    return PREFLIGHT_FAILED if failing else 0


def _write(directory: Path, document: dict[str, Any]) -> None:
    try:
        (directory / "measured.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        hosts = "".join(f"{host}\n" for host in document["failing_hosts"])
        (directory / "failing_hosts.txt").write_text(hosts, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"cannot write a report to {directory}: {error.strerror}\n")


if __name__ == "__main__":
    sys.exit(main())
