"""`launch explain`: what `launch` would do here, and why."""

import argparse
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints.commands.subcommand import Subcommand, without_separator, write
from entrypoints.environments import Allocation, Detection, detect
from entrypoints.host.fabric_settings import Setting
from entrypoints.host.settings import Host, examine_host
from entrypoints.host.tree import Tree
from entrypoints.options import JOB_DIR
from entrypoints.ray.ports import control_port, ephemeral_floor, ray_blocks


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document")
    add("--sysfs-root", metavar="DIR", type=Path, default=Path("/"), help="examine a recorded host instead of this one")
    add("command", nargs=argparse.REMAINDER, help="the command that would run")


def _run(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int:
    detection = detect(variables, parsed.hostname or socket.gethostname())
    host = examine_host(Tree.at(parsed.sysfs_root), variables)
    document = explain(detection, host, variables, parsed.control_port, without_separator(parsed.command))
    write(json.dumps(document, indent=2) if parsed.json else as_text(document))
    return 0


def explain(
    detection: Detection, host: Host, variables: Mapping[str, str], chosen_port: int | None, command: Sequence[str]
) -> dict[str, Any]:
    """The document of `launch explain --json`."""
    allocation = detection.allocation
    control = chosen_port or control_port(allocation.job_id)
    floor = ephemeral_floor()
    warnings = [*allocation.all_warnings, *host.warnings]
    settings = [*host.settings, *(host.interface_settings() if allocation.node_count > 1 else [])]
    if control >= floor:
        warnings.append(f"control port {control} may be taken: it is in the ephemeral range, which starts at {floor}")
    if allocation.head is None and not variables.get(JOB_DIR):
        warnings.append(
            f"{allocation.environment} does not name the head: set SLIPWAY_HEAD on every node, or share a {JOB_DIR}"
        )
    block = ray_blocks(allocation.job_id, allocation.node_rank, floor)[0]
    return {
        "environment": allocation.environment,
        "attach": allocation.attach,
        "job_id": allocation.job_id,
        "node_count": allocation.node_count,
        "node_rank": allocation.node_rank,
        "local_rank": allocation.local_rank,
        "hosts": list(allocation.hosts) if allocation.hosts is not None else None,
        "head": allocation.head,
        "variables": dict(allocation.variables),
        "runners_up": [_brief(runner_up) for runner_up in detection.runners_up],
        "conflicts": list(detection.conflicts),
        "warnings": warnings,
        "interface": host.fabric.interface,
        "interface_reason": host.fabric.interface_reason,
        "fabric": host.fabric.document(),
        "env": [_in_force(setting, variables) for setting in settings],
        "ports": {"control": control, **block.named, "workers": [block.workers.start, block.workers.stop - 1]},
        "command": list(command) or None,
    }


def _in_force(setting: Setting, variables: Mapping[str, str]) -> dict[str, str]:
    """The value that children get: the user's if set, else ours."""
    value = variables.get(setting.name)
    if value is None or value == setting.value:
        return {"name": setting.name, "value": setting.value, "reason": setting.reason}
    return {"name": setting.name, "value": value, "reason": f"set by you instead of {setting.value}: {setting.reason}"}


def _brief(allocation: Allocation) -> dict[str, Any]:
    return {
        "environment": allocation.environment,
        "node_count": allocation.node_count,
        "node_rank": allocation.node_rank,
        "head": allocation.head,
        "variables": dict(allocation.variables),
    }


def as_text(document: Mapping[str, Any]) -> str:
    """The document as text, one fact per line."""
    reason = " ".join(f"{name}={value}" for name, value in document["variables"].items())
    ports = document["ports"]
    hosts = ", ".join(document["hosts"] or ()) or ("only the head is known" if document["head"] else "not known")
    lines = [
        f"environment  {document['environment']}  ({reason or 'nothing else is set'})",
        f"node         {document['node_rank']} of {document['node_count']}, local rank {document['local_rank']}",
        f"head         {document['head'] or 'not known'}",
        f"hosts        {hosts}",
        f"ports        control {ports['control']}, Ray {ports['gcs']}-{ports['workers'][1]} or the next free block",
    ]
    lines.append(f"interface    {document['interface'] or 'none'}: {document['interface_reason']}")
    lines.append(f"fabric       {_fabric_line(document['fabric'])}")
    lines += [f"             without {other['name']}: {other['reason']}" for other in document["fabric"]["excluded"]]
    lines += [f"env          {entry['name']}={entry['value']}: {entry['reason']}" for entry in document["env"]]
    if document["attach"]:
        lines.append(f"attach       {document['attach']}: no cluster is formed")
    if document["command"]:
        lines.append(f"command      {' '.join(document['command'])}, on the head")
    lines += [
        f"runner-up    {other['environment']}: node {other['node_rank']} of {other['node_count']}"
        for other in document["runners_up"]
    ]
    lines += [f"conflict     {text}" for text in document["conflicts"]]
    lines += [f"warning      {text}" for text in document["warnings"]]
    return "\n".join(lines)


def _fabric_line(fabric: Mapping[str, Any]) -> str:
    rails = ", ".join(f"{hca['name']} ({hca['rate']:g} Gbit/s)" for hca in fabric["hcas"])
    kinds = ", ".join(dict.fromkeys(gpu["architecture"] or "unknown model" for gpu in fabric["gpus"]))
    return (
        f"{fabric['kind']}{f': {rails}' if rails else ''}; {len(fabric['gpus'])} GPUs{f' ({kinds})' if kinds else ''}"
    )


SUBCOMMAND = Subcommand("show what was detected and what would happen, and do nothing.", _add_arguments, _run)
