"""From a detected environment to an exit status: this process leads the job or follows its head."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from entrypoints.environments import Allocation, Detection, detect
from entrypoints.environments.explicit import PLACE
from entrypoints.environments.kubernetes.kuberay import ADDRESS
from entrypoints.environments.single import Single
from entrypoints.errors import DetectionError, NotYetThereError, UsageError
from entrypoints.host.accelerators import hidden_devices
from entrypoints.host.child_environment import child_environment
from entrypoints.host.control_groups import available_cpus
from entrypoints.host.network.fabric_settings import Setting
from entrypoints.host.settings import Host, examine_host
from entrypoints.host.starting_cache import use_starting_cache
from entrypoints.host.tree import Tree
from entrypoints.job.existing import require_cluster
from entrypoints.job.head import lead, run_command
from entrypoints.job.node import Node
from entrypoints.job.worker import follow
from entrypoints.logs import log_folder, quoted, start_logging
from entrypoints.options import Options
from entrypoints.preflight import Verdict, failures, gather_facts, run_checks
from entrypoints.processes import raise_file_limit, raise_process_limit
from entrypoints.ray.ports import control_port
from entrypoints.wire.job_directory import job_directory
from entrypoints.wire.rendezvous import meeting_place
from entrypoints.wire.secret import load_token, make_token

_LOOK_AGAIN = 0.5
"""Seconds between two attempts to detect an environment that is not complete yet."""

log = logging.getLogger(__name__)


def locate(variables: Mapping[str, str], hostname: str, deadline: float) -> Detection:
    """Detect the environment, retrying until the deadline while something is missing. Raises DetectionError."""
    give_up = time.monotonic() + deadline
    while True:
        try:
            return detect(variables, hostname)
        except NotYetThereError as error:
            if time.monotonic() > give_up:
                raise DetectionError(f"{error.message}, after {deadline:g} s", error.hint) from error
        time.sleep(_LOOK_AGAIN)


def launch(detection: Detection, options: Options, hostname: str, variables: Mapping[str, str]) -> int:
    """Run this node's part of the job and return the job's exit status. Raises LaunchError."""
    allocation = detection.allocation
    rank, logs = allocation.node_rank, options.log_directory
    folder = log_folder(logs, rank, hostname) if logs is not None else None
    start_logging(rank, allocation.local_rank, folder)
    raise_file_limit()
    raise_process_limit()
    log.info("%s: node %d of %d (%s)", allocation.environment, allocation.node_rank, allocation.node_count, hostname)
    for text in (*detection.conflicts, *allocation.warnings):
        log.warning("%s", text)
    if options.min_nodes is not None and options.min_nodes > allocation.node_count and not allocation.attach:
        raise UsageError(
            f"--min-nodes is {options.min_nodes}, but {allocation.environment} says {allocation.node_count} nodes",
            hint="`launch explain` shows why; check it if you expected more nodes",
        )
    if options.spares >= allocation.node_count and not allocation.attach and options.spares:
        raise UsageError(
            f"--spares is {options.spares}, but {allocation.environment} says {allocation.node_count} nodes",
            hint="at least one node must work: choose fewer spares, or start more nodes",
        )
    if allocation.started_alone and not allocation.attach:
        raise allocation.started_alone
    if not allocation.attach:  # Ray reads it too, and it names another cluster
        variables = {name: value for name, value in variables.items() if name != ADDRESS}
    several = allocation.node_count > 1 or allocation.local_rank > 0
    met = several or (allocation.task_count or 1) > 1
    directory = job_directory(variables, Tree()) if met and not allocation.attach else None
    if directory is None:
        token = load_token(variables, required=several and not allocation.attach)
        return asyncio.run(_launch(allocation, options, hostname, variables, token))
    port = options.control_port or control_port(allocation.job_id)
    known = load_token(variables, required=False)
    with meeting_place(directory, allocation, known, options.deadline, port, hostname) as (where, token):
        return asyncio.run(_launch(where, options, hostname, variables, token))


async def _launch(
    allocation: Allocation, options: Options, hostname: str, variables: Mapping[str, str], token: str | None
) -> int:
    attach = allocation.attach
    if not allocation.is_head and not attach:
        _ = allocation.heads  # raises if no head is known
    host = examine_host(Tree(), variables)
    options = _within_limits(options, variables)
    for setting in host.settings:
        if variables.get(setting.name) != setting.value:  # the image sets some already; do not log those
            log.info("%s", _shown(setting, variables))
    for text in host.warnings:
        log.warning("%s", text)
    # A single command without Ray may be anything, even `nvidia-smi` on a host without GPU: run it without checks.
    wanted = options.preflight and not attach and (options.ray is not None or allocation.node_count > 1)
    unfit = _preflight(allocation, options, host, variables) if wanted else []
    environment = child_environment(
        {name: value for name, value in variables.items() if name not in PLACE}, host.settings
    )
    if not attach:
        environment |= use_starting_cache(Tree(), host, environment)
    node = Node(allocation, options, host, hostname, environment, unfit)
    try:
        if attach:
            await node.unless_failed(require_cluster(node, attach))
            if not allocation.is_head:
                log.info("%s=%s exists already: the command runs on node 0 only", ADDRESS, attach)
                return 0
            log.info("%s=%s exists already: no cluster is formed", ADDRESS, attach)
            return await node.unless_failed(run_command(node, {**node.environment, ADDRESS: attach}))
        if not allocation.is_head:
            assert token is not None
            return await follow(node, token)
        # A single node with a token listens too: other tasks on it may connect and wait for the end.
        listen = token is not None and allocation.environment != Single.name
        return await lead(node, token or make_token(), listen=listen)
    finally:
        await node.clean()


def _within_limits(options: Options, variables: Mapping[str, str]) -> Options:
    """The options with what a scheduler leaves to this process, where Ray would count more: CPUs, and GPUs if a
    variable hides some by a word that Ray counts as one."""
    if options.ray is None:
        return options
    cpus, gpus = options.ray.cpus, options.ray.gpus
    entries = {name: len(variables[name].split(",")) for name in hidden_devices(variables)}
    fewer = [count for name, count in hidden_devices(variables).items() if count < entries[name]]
    if gpus is None and fewer:
        gpus = min(fewer)
    return replace(options, ray=replace(options.ray, cpus=available_cpus() if cpus is None else cpus, gpus=gpus))


def _preflight(
    allocation: Allocation, options: Options, host: Host, variables: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run this node's checks and log the problems. Returns the failures, which the node reports to the head."""
    use_gpus = options.ray is None or options.ray.gpus != 0
    facts = gather_facts(
        *(Tree(), host, allocation, variables, options.control_port),
        use_gpus=use_gpus,
        cpus=options.ray.cpus if options.ray else None,
        object_store=options.ray.object_store_memory if options.ray else None,
    )
    findings = run_checks(facts)
    for finding in findings:
        if finding.verdict in (Verdict.WARN, Verdict.FAIL):
            log.warning("preflight %s: %s; %s", finding.check, finding.message, finding.fix)
    return failures(findings)


def _shown(setting: Setting, variables: Mapping[str, str]) -> str:
    """A variable with its reason, marked if the user set another value."""
    value = variables.get(setting.name, setting.value)
    instead = "" if value == setting.value else f" (set by you instead of {quoted(setting.value)})"
    return f"{setting.name}={quoted(value)}{instead}: {setting.reason}"
