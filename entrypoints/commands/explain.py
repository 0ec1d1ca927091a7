"""`launch explain`: what `launch` would do here, and why."""

import argparse
import json
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints.commands import Subcommand, without_separator, write
from entrypoints.environments import Allocation, Detection, detect
from entrypoints.environments.base import NOTHING_RECOGNISED
from entrypoints.errors import CommandNotFoundError, DetectionError, LaunchError, TokenError, UsageError
from entrypoints.host.network.fabric_settings import Setting
from entrypoints.host.settings import Host, examine_host
from entrypoints.host.tree import Tree
from entrypoints.logs import quoted
from entrypoints.options import JOB_DIR
from entrypoints.ray.ports import control_port, ephemeral_floor, ray_blocks
from entrypoints.wire.job_directory import job_directory
from entrypoints.wire.secret import load_token

_HOW_TO_HAVE_SEVERAL = (
    "several nodes need --hosts on each, or one task per node: srun, mpirun, … (`launch environments` lists all)"
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document")
    add("--sysfs-root", metavar="DIR", type=Path, default=Path("/"), help="examine a recorded host instead of this one")
    add("command", nargs=argparse.REMAINDER, help="the command that would run")


def _run(parsed: argparse.Namespace, variables: Mapping[str, str]) -> int:
    detection = detect(variables, parsed.hostname or socket.gethostname())
    host = examine_host(Tree.at(parsed.sysfs_root), variables)
    command = without_separator(parsed.command)
    document = explain(detection, host, variables, parsed.control_port, command, parsed.min_nodes)
    write(json.dumps(document, indent=2) if parsed.json else as_text(document))
    return 0


def explain(
    detection: Detection,
    host: Host,
    variables: Mapping[str, str],
    chosen_port: int | None,
    command: Sequence[str],
    min_nodes: int | None = None,
) -> dict[str, Any]:
    """The document of `launch explain --json`."""
    allocation = detection.allocation
    control = chosen_port or control_port(allocation.job_id)
    floor = ephemeral_floor()
    warnings = [*allocation.warnings, *host.warnings]
    settings = [*host.settings, *(host.interface_settings() if allocation.node_count > 1 else [])]
    if control >= floor:
        warnings.append(f"control port {control} may be taken: it is in the ephemeral range, which starts at {floor}")
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
        "failures": [
            {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
            for error in _failures(allocation, variables, command, min_nodes)
        ],
        "interface": host.fabric.interface,
        "interface_reason": host.fabric.interface_reason,
        "fabric": host.fabric.document(),
        "env": [_in_force(setting, variables) for setting in settings],
        "ports": {"control": control, **block.named, "workers": [block.workers.start, block.workers.stop - 1]},
        "command": list(command) or None,
    }


def _failures(
    allocation: Allocation, variables: Mapping[str, str], command: Sequence[str], min_nodes: int | None
) -> Iterator[LaunchError]:
    """The errors with which `launch` would end here."""
    if command and command[0] != "train" and shutil.which(command[0], path=variables.get("PATH")) is None:
        yield CommandNotFoundError(f"cannot run {command[0]!r}: it is not on the PATH")
    if allocation.attach:
        return
    if min_nodes is not None and min_nodes > allocation.node_count:
        yield UsageError(f"--min-nodes is {min_nodes}, but there are {allocation.node_count} nodes")
    if allocation.started_alone:
        yield allocation.started_alone
    directory = job_directory(variables, Tree())
    if allocation.head is None and directory is None:
        yield DetectionError(
            f"{allocation.environment} does not name the head",
            f"set SLIPWAY_HEAD on every node, or share a {JOB_DIR}",
        )
    if allocation.node_count > 1 or allocation.local_rank > 0:
        try:
            load_token(variables, required=directory is None)
        except TokenError as error:
            yield error


def _in_force(setting: Setting, variables: Mapping[str, str]) -> dict[str, str]:
    """The value that children get: the user's if set, else ours."""
    value = variables.get(setting.name)
    if value is None or value == setting.value:
        return {"name": setting.name, "value": setting.value, "reason": setting.reason}
    reason = f"set by you instead of {quoted(setting.value)}: {setting.reason}"
    return {"name": setting.name, "value": value, "reason": reason}


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
    reason = " ".join(f"{name}={quoted(value)}" for name, value in document["variables"].items())
    ports = document["ports"]
    hosts = ", ".join(document["hosts"] or ()) or ("only the head is known" if document["head"] else "not known")
    lines = [
        f"environment  {document['environment']}  ({reason or NOTHING_RECOGNISED})",
        *([f"             {_HOW_TO_HAVE_SEVERAL}"] if not reason else []),
        f"node         {document['node_rank']} of {document['node_count']}, local rank {document['local_rank']}",
        f"head         {document['head'] or 'not known'}",
        f"hosts        {hosts}",
        f"ports        control {ports['control']}, Ray {ports['gcs']}-{ports['workers'][1]} or the next free block",
    ]
    lines.append(f"interface    {document['interface'] or 'none'}: {document['interface_reason']}")
    lines.append(f"fabric       {_fabric_line(document['fabric'])}")
    lines += [f"             without {other['name']}: {other['reason']}" for other in document["fabric"]["excluded"]]
    lines += [f"env          {entry['name']}={quoted(entry['value'])}: {entry['reason']}" for entry in document["env"]]
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
    lines += [
        f"would fail   {failure['message']}" + (f"; {failure['hint']}" if failure["hint"] else "")
        for failure in document["failures"]
    ]
    return "\n".join(lines)


def _fabric_line(fabric: Mapping[str, Any]) -> str:
    rails = ", ".join(f"{hca['name']} ({hca['rate']:g} Gbit/s)" for hca in fabric["hcas"])
    kinds = ", ".join(dict.fromkeys(gpu["architecture"] or "unknown model" for gpu in fabric["gpus"]))
    return (
        f"{fabric['kind']}{f': {rails}' if rails else ''}; {len(fabric['gpus'])} GPUs{f' ({kinds})' if kinds else ''}"
    )


SUBCOMMAND = Subcommand("show what was detected and what would happen, and do nothing.", _add_arguments, _run)
