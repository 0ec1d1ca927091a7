"""Checks of this node that run before the nodes meet. A failure stops the launch and tells the fix."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints.environments import Allocation
from entrypoints.errors import PreflightError
from entrypoints.host.control_groups import available_cpus
from entrypoints.host.settings import Host
from entrypoints.host.tree import Tree
from entrypoints.preflight.check import Check, Finding, NodeFacts, Verdict
from entrypoints.preflight.devices import driver, gpu_access, rdma
from entrypoints.preflight.limits import (
    address_space,
    locked_memory,
    memory,
    open_files,
    processes,
    shared_memory,
    stack,
)
from entrypoints.preflight.resources import disk, leftovers, ports, privacy
from entrypoints.ray.ports import control_port

__all__ = [
    "CHECKS",
    "Finding",
    "NodeFacts",
    "Verdict",
    "as_table",
    "failures",
    "gather_facts",
    "refuse",
    "run_checks",
    "write_report",
]

CHECKS: tuple[Check, ...] = (
    *(shared_memory, memory, locked_memory, stack, open_files, processes, address_space),
    *(disk, privacy, ports, leftovers),
    *(gpu_access, driver, rdma),
)
REPORT, FAILING_HOSTS = "preflight.json", "failing_hosts.txt"

log = logging.getLogger(__name__)


def gather_facts(
    tree: Tree,
    host: Host,
    allocation: Allocation,
    variables: Mapping[str, str],
    chosen_port: int | None,
    *,
    use_gpus: bool = True,
    cpus: int | None = None,
    object_store: int | None = None,
) -> NodeFacts:
    """The facts that the checks need."""
    return NodeFacts(
        tree=tree,
        host=host,
        allocation=allocation,
        variables=variables,
        target=host.target,
        control_port=chosen_port or control_port(allocation.job_id),
        chosen_port=chosen_port,
        use_gpus=use_gpus,
        cpus=available_cpus(tree) if cpus is None else cpus,
        object_store=object_store,
    )


def run_checks(facts: NodeFacts) -> list[Finding]:
    """The findings of all checks, in order."""
    return [check(facts) for check in CHECKS]


def as_table(findings: Sequence[Finding]) -> str:
    """The findings as text, one check per line, with its fix below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<5} {finding.check:<10} {finding.message}")
        if finding.fix:
            lines.append(f"{'':<16} {finding.fix}")
    return "\n".join(lines)


def failures(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The failures among the findings, as documents for other nodes."""
    return [finding.document() for finding in findings if finding.verdict is Verdict.FAIL]


def refuse(failed: Mapping[str, Sequence[Mapping[str, Any]]], directory: Path) -> None:
    """Raise PreflightError if any host failed, with a line for each failure, and write a report to `directory`.

    `failed` maps host names to their `failures`.
    """
    bad = {host: findings for host, findings in failed.items() if findings}
    if not bad:
        return
    lines = [f"  {host}: {finding['check']}: {finding['message']}" for host, list_ in bad.items() for finding in list_]
    fixes = dict.fromkeys(str(finding["fix"]) for list_ in bad.values() for finding in list_ if finding["fix"])
    where = write_report(failed, directory)
    noted = f"; {where} lists them for the scheduler's --exclude" if where else ""
    raise PreflightError(
        f"{len(bad)} of {len(failed)} hosts are not fit{noted}\n" + "\n".join(lines), "; ".join(fixes) or "see above"
    )


def write_report(failed: Mapping[str, Sequence[Mapping[str, Any]]], directory: Path) -> Path | None:
    """Write the report and the list of failing hosts. Returns the list's path, None if it cannot be written."""
    try:
        (directory / REPORT).write_text(json.dumps(failed, indent=2) + "\n", encoding="utf-8")
        list_ = directory / FAILING_HOSTS
        list_.write_text("".join(f"{host}\n" for host, findings in failed.items() if findings), encoding="utf-8")
    except OSError as error:
        log.warning("cannot write a report to %s: %s", directory, error.strerror)
        return None
    return list_
