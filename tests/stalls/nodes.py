"""Stalls whole nodes, each a container: `python -m tests.stalls.nodes --nodes 2 --injections 6`, with a Docker engine.

Ray runs on one network, collectives on another. An injection takes the second network away from a node, freezes a
node, or limits its processor time. Prints a table as `python -m tests.stalls` does.
"""

import argparse
import json
import re
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
PHASES = ("update", "log_probs", "load", "save")
SILENT = r"on {node} is on a node that does not answer"
# What the explanation must say of a fault of the node with the address {node}.
FAULTS = {
    "blocked network": r"all ranks wait in the same collective|{node}: eth1 is gone",
    "a node is frozen": SILENT,
    "a slow processor, standing in for a slow GPU": r"{node}: the container's CPU limit held processes|" + SILENT,
}


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stalls.nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--injections", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600.0, help="longest time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--image", default="slipway:cpu")
    parser.add_argument("--results", type=Path, help="file that gets a line of JSON per injection")
    given = parser.parse_args()
    begin, rows = time.monotonic(), dict[str, list[bool]]()
    for seed in range(given.seed, given.seed + given.injections):
        if time.monotonic() - begin > given.seconds:
            break
        fault = list(FAULTS)[seed % len(FAULTS)]
        random = Random(seed)
        phase, victim = random.choice(PHASES), random.randrange(1, given.nodes)
        right, lines = inject(fault, phase, victim, random.uniform(0, 3), given.nodes, given.image)
        rows.setdefault(fault, []).append(right)
        record = {"seed": seed, "fault": fault, "node": victim, "phase": phase, "right": right, "lines": lines}
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if not right:
            sys.stderr.write(f"wrong: {json.dumps(record, indent=2)}\n")
    sys.stdout.write("| fault | injections | right |\n| --- | --- | --- |\n")
    for fault, found in rows.items():
        sys.stdout.write(f"| {fault} | {len(found)} | {sum(found)} |\n")
    return 0 if all(right for found in rows.values() for right in found) else 1


def inject(fault: str, phase: str, victim: int, after: float, nodes: int, image: str) -> tuple[bool, list[str]]:
    """Starts a cluster, injects a fault some seconds after its phases began; whether it was explained, and how."""
    name = f"slipway-stalls-{secrets.token_hex(3)}"
    with ExitStack() as stack, tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o777)
        for network in (name, f"{name}-b"):
            docker("network", "create", network)
            stack.callback(docker, "network", "rm", network)
        containers = [f"{name}-{number}" for number in range(nodes)]
        for number, container in enumerate(containers):
            ray = "--head --port 6379" if number == 0 else f"--address {containers[0]}:6379"
            variables = {
                "PYTHONPATH": "/src",
                "RAY_AUTH_MODE": "disabled",
                "GLOO_SOCKET_IFNAME": "eth1",
            }
            options = [part for item in variables.items() for part in ("-e", "=".join(item))]
            docker(
                *("create", "--name", container, "--network", name, "--shm-size", "1g", *options),
                *("-v", f"{ROOT}:/src:ro", "-v", f"{shared}:/shared", "--entrypoint", "sh", image),
                *("-c", f"until ray start {ray} --num-cpus 2 --block; do sleep 1; done"),
            )
            stack.callback(docker, "rm", "-f", container)
            docker("network", "connect", f"{name}-b", container)
            docker("start", container)
        wait_for_nodes(containers[0], nodes)
        command = ["docker", "exec", "-e", f"RAY_ADDRESS={containers[0]}:6379", containers[0]]
        head = subprocess.Popen(
            [*command, "python", "-m", "tests.stalls.inside", str(nodes), phase], stdout=subprocess.PIPE, text=True
        )
        stack.callback(head.wait)
        stack.callback(head.kill)
        ready = head.stdout.readline().split() if head.stdout else []
        if not ready:
            return False, ["the workers did not start"]
        time.sleep(after)
        if fault == "blocked network":
            docker("network", "disconnect", f"{name}-b", containers[victim])
        elif fault == "a node is frozen":
            docker("pause", containers[victim])
        else:
            docker("update", "--cpus", "0.02", containers[victim])
        lines = (head.communicate()[0] or "").splitlines()
        # Slots are numbered head first, then by address.
        address = docker(
            *("inspect", "-f", f'{{{{(index .NetworkSettings.Networks "{name}").IPAddress}}}}', containers[victim])
        )
        says = FAULTS[fault].replace("{node}", re.escape(address))
        named = any(re.search(says, line) for line in lines)
        return named and f"no progress in {phase} for " in "\n".join(lines), lines


def wait_for_nodes(head: str, nodes: int) -> None:
    """Returns once all nodes have joined. Raises RuntimeError after three minutes."""
    program = (
        "import ray; ray.init('127.0.0.1:6379', logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))"
    )
    end = time.monotonic() + 180
    while time.monotonic() < end:
        found = subprocess.run(["docker", "exec", head, "python", "-c", program], capture_output=True, text=True)
        if found.stdout.strip().endswith(str(nodes)):
            return
        time.sleep(1)
    raise RuntimeError(f"{nodes} nodes did not join within three minutes")


if __name__ == "__main__":
    sys.exit(main())
