"""`launch preflight`: the checks of this node; with `--speed` and `--network`, of all nodes' devices and links."""

import argparse
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from entrypoints.commands import Subcommand, write
from entrypoints.environments import detect
from entrypoints.host.settings import examine_host
from entrypoints.host.tree import Tree
from entrypoints.options import REPORT_DIR
from entrypoints.preflight import as_table, failures, gather_facts, refuse, run_checks


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document")
    add("--network", action="store_true", help="form the cluster and measure the network between each pair of nodes")
    add("--speed", action="store_true", help="form the cluster and measure the devices of each node")
    add("--sysfs-root", metavar="DIR", type=Path, default=Path("/"), help="check a recorded host instead of this one")


def _run(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int | list[str]:
    directory = variables.get(REPORT_DIR) or "."
    if parsed.network or parsed.speed:
        flags = [f"--{name}" for name in ("network", "speed", "json") if getattr(parsed, name)]
        return [sys.executable, "-P", "-m", "entrypoints.preflight.measure", "--output", directory, *flags]
    hostname = parsed.hostname or socket.gethostname()
    tree = Tree.at(parsed.sysfs_root)
    allocation = detect(variables, hostname).allocation
    findings = run_checks(gather_facts(tree, examine_host(tree, variables), allocation, variables, parsed.control_port))
    document = {"host": hostname, "findings": [finding.document() for finding in findings]}
    write(json.dumps(document, indent=2) if parsed.json else as_table(findings))
    refuse({hostname: failures(findings)}, Path(directory))
    return 0


SUBCOMMAND = Subcommand("check whether this node is fit for a job.", _add_arguments, _run)
