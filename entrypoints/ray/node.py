"""One node's part of the Ray cluster: `ray start` with explicit ports and directories, and the processes to watch."""

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from entrypoints.error_lines import causes, error_lines, read_tail
from entrypoints.errors import RayFailedError
from entrypoints.host.child_environment import open_to_others, without_launchers
from entrypoints.host.network.interfaces import bracketed
from entrypoints.host.network.topology import topology_labels
from entrypoints.options import Dashboard, RayOptions
from entrypoints.processes import Process, ProcessTree
from entrypoints.ray.attach import LOOPBACK_ONLY
from entrypoints.ray.directory import NodeDirectory
from entrypoints.ray.log_mirror import LogMirror
from entrypoints.ray.object_store import choose_object_store
from entrypoints.ray.ports import ClaimedPorts, RayPorts, can_bind

WATCHED = ("raylet", "gcs_server")
_HEAD_ONLY = ("gcs", "client_server", "dashboard", "dashboard_metrics")
_PATIENCE = {"RAY_worker_register_timeout_seconds": "300"}
"""Defaults that the user can override. Ray starts a worker for each CPU at once: hundreds of them that import Python
from a slow disk need more than its default of 60 s."""
_REMEMBERED_CALLS = {"RAY_task_events_max_num_task_in_gcs": "10000"}
"""A default that the user can override. The head keeps 3 KiB of each call, by default of 100,000, so it grows for hours
up to 300 MiB. `ray list tasks` and the dashboard show 10,000 at most."""
_WITHOUT_DASHBOARD = {"RAY_enable_metrics_collection": "0"}
"""A default that the user can override. Each node otherwise serves its metrics to everybody, without a token."""
_DASHBOARD_PORT = 8265
"""Ray's default."""
_TIME_LIMIT = re.compile(r"(?i)timed.?out|timeout|deadline exceeded")
"""Ray's limits, mostly of 30 s, which cannot be set."""
_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for what a slow start left: a raylet that ends in order leaves the cluster."""

log = logging.getLogger(__name__)


def ray_authentication(token: str) -> dict[str, str]:
    """The variables for token authentication. They are set everywhere: otherwise a head may require tokens that its
    workers do not send."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def _inductor_cache(environment: Mapping[str, str]) -> Path:
    """Inductor's own default."""
    return Path("/tmp", f"torchinductor_{environment.get('USER') or os.getuid()}")


def temporary_files(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Variables for Ray's workers, whose temporary files end with the job; none if the user chose a place for them.

    Killed workers leave such files, and vLLM's engines always leave one. Inductor's cache stays where it would be.
    """
    if "TMPDIR" in environment:
        return {}
    cache = _inductor_cache(environment)
    with contextlib.suppress(OSError):
        cache.mkdir(mode=0o700, exist_ok=True)
    if problem := open_to_others(cache):
        log.warning("%s %s: compiled code is kept during this job only; remove it to keep more", cache, problem)
        cache = directory / cache.name
    return {"TMPDIR": str(directory), "TORCHINDUCTOR_CACHE_DIR": str(cache)}


class RayNode:
    """Ray on this node. The process tree owns its processes and ends them."""

    def __init__(
        self,
        process_tree: ProcessTree,
        options: RayOptions,
        claimed: ClaimedPorts,
        environment: Mapping[str, str],
        token: str,
        prefix: str = "slipway-ray-",
        *,
        alone: bool = False,
    ) -> None:
        """Takes over the claimed ports. With `alone` Ray's servers listen on loopback only. Raises RayFailedError if
        /tmp cannot be written."""
        self._process_tree = process_tree
        self._options = options
        self._claimed = claimed
        self._ports = ports = claimed.ports
        given = dict(label.split("=", 1) for label in options.labels.split(",") if label)
        self._labels = topology_labels(environment) | given
        self._dashboard: Dashboard | None = None
        """The dashboard with its port; None on workers."""
        self._for_clients = ray_authentication(token) | ({LOOPBACK_ONLY: "0"} if alone else {})
        """Variables that every program of the cluster needs."""
        self.directory = _make_directory(prefix)
        self._environment = (
            _PATIENCE
            | _REMEMBERED_CALLS
            | temporary_files(environment, self.directory.temporary)
            | ({} if options.dashboard else _WITHOUT_DASHBOARD)
            | without_launchers(environment)
            | {
                **self._for_clients,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_enable_autoscaler_v2": "1",  # with it `ray status` needs no monitor process
                "DASHBOARD_METRIC_PORT": str(ports.named["dashboard_metrics"]),
            }
        )

    def use_tls(self, variables: Mapping[str, str]) -> None:
        """Encrypt all of Ray's traffic with the certificates that these variables name. Call it before the start."""
        self._for_clients |= variables
        self._environment |= variables

    def become_head(self, address: str) -> str:
        """Choose the addresses of Ray's head on this node. Returns the cluster's."""
        if self._options.dashboard:
            self._dashboard = _with_port(self._options.dashboard, self._ports)
        return f"{bracketed(address)}:{self._ports.named['gcs']}"

    async def start_head(self, address: str) -> None:
        """Start Ray's head; `become_head` comes first. Raises RayFailedError."""
        ports, dashboard = self._ports.named, self._dashboard
        await self._start(
            address,
            "--head",
            f"--port={ports['gcs']}",
            f"--ray-client-server-port={ports['client_server']}",
            f"--include-dashboard={str(dashboard is not None).lower()}",
            f"--dashboard-host={dashboard.host if dashboard else '127.0.0.1'}",
            f"--dashboard-port={dashboard.port if dashboard else ports['dashboard']}",
            "--no-monitor",  # there is no autoscaler
        )

    async def start_worker(self, address: str, cluster: str, report_slow: Callable[[str], None]) -> None:
        """Join the cluster. `report_slow` gets the cause of each start that is repeated. Raises RayFailedError."""
        await self._start(address, f"--address={cluster}", report_slow=report_slow)

    async def _start(self, address: str, *arguments: str, report_slow: Callable[[str], None] = lambda _: None) -> None:
        store = choose_object_store(self._options.object_store_memory)
        log.info("Ray on %s, object store %d MiB: %s", address, store.size // 1024**2, store.reason)
        ports = {name: port for name, port in self._ports.named.items() if name not in _HEAD_ONLY}
        workers = self._ports.workers
        command = [
            *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *arguments),
            f"--node-ip-address={address}",
            f"--temp-dir={self.directory.ray}",
            f"--object-store-memory={store.size}",
            *(f"--{name.replace('_', '-')}-port={port}" for name, port in ports.items()),
            f"--min-worker-port={workers.start}",
            f"--max-worker-port={workers.stop - 1}",
            "--disable-usage-stats",
            "--log-style=record",
            "--log-color=false",
        ]
        if self._options.debugger_external:
            command.append("--ray-debugger-external")
        if self._options.cpus is not None:
            command.append(f"--num-cpus={self._options.cpus}")
        if self._options.gpus is not None:
            command.append(f"--num-gpus={self._options.gpus}")
        if self._options.resources:
            command.append(f"--resources={self._options.resources}")
        if self._labels:
            command.append("--labels=" + ",".join(f"{name}={value}" for name, value in self._labels.items()))
        vital = WATCHED if "--head" in arguments else WATCHED[:1]
        while True:
            try:
                await self._run(command, "ray start")
                return
            except RayFailedError as error:
                if not self._was_only_slow(error, vital):
                    raise
                log.warning("Ray is started again, as one of its time limits passed: %s", error.message)
                report_slow(error.message)
            await self._process_tree.end_orphans(_GRACE)

    def _was_only_slow(self, error: RayFailedError, vital: Sequence[str]) -> bool:
        """Whether a start failed by one of Ray's time limits alone, so that another one may succeed."""
        if not _TIME_LIMIT.search(error.message):
            return False
        dead = set(vital) - set(self._process_tree.adopted(WATCHED))
        agents_failed = any(last_errors(self._logs, agent) for agent in AGENTS)
        return not dead or (dead == {"raylet"} and not agents_failed)

    @property
    def dashboard_url(self) -> str | None:
        """The dashboard's URL on the head; None on workers."""
        if self._dashboard is None:
            return None
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._dashboard.host, self._dashboard.host)
        return f"http://{bracketed(host)}:{self._dashboard.port}"

    def client_environment(self, cluster: str) -> dict[str, str]:
        """The variables with which a program on this node reaches the cluster, as a driver or by `ray job submit`."""
        variables = {"RAY_ADDRESS": cluster, **self._for_clients}
        if url := self.dashboard_url:
            variables["RAY_API_SERVER_ADDRESS"] = url
        return variables

    async def wait_for_nodes(self, cluster: str, count: int) -> dict[str, int]:
        """Wait until Ray lists all nodes as alive. Returns the number of GPUs that it counts on each host.

        The caller sets the deadline.
        """
        program = Path(__file__).with_name("gcs.py")
        lines = await self._run([sys.executable, "-P", str(program), cluster, str(count)], "asking Ray for its nodes")
        gpus: dict[str, int] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
        return gpus

    async def _run(self, command: list[str], name: str) -> list[str]:
        """Run one of Ray's programs and return its output lines. Raises RayFailedError with its errors."""
        output = self._output(name)
        with output.open("wb") as file:
            process = self._process_tree.spawn(command, self._environment, output=file)
        try:
            status = await process.status()
        except asyncio.CancelledError:
            await process.end(grace=0)
            raise
        if status != 0:
            raise RayFailedError(f"{name} failed with status {status}{all_errors(self._logs, output)}")
        return read_tail(output)

    def _output(self, name: str) -> Path:
        return self.directory.path / f"{name.replace(' ', '-')}.log"

    def watched(self) -> dict[str, Process]:
        """Ray's vital processes on this node, by name. Raises RayFailedError if the raylet has already died."""
        adopted = self._process_tree.adopted(WATCHED)
        if "raylet" not in adopted:
            raise RayFailedError(f"ray start left no raylet behind{self.last_errors('raylet')}")
        return adopted

    @property
    def _logs(self) -> Path:
        return self.directory.ray / "session_latest" / "logs"

    def last_errors(self, name: str) -> str:
        """The last errors of a Ray process, to be appended to a message: its log is removed with the directory."""
        return last_errors(self._logs, name)

    def errors_so_far(self) -> str:
        """All errors since Ray was started, to be appended to a message."""
        return all_errors(self._logs, self._output("ray start"))

    def mirror_logs(self, folder: Path) -> LogMirror:
        """A mirror of the logs of Ray's processes, which are removed with the directory."""
        return LogMirror(self._logs, folder / "ray")

    def clean(self) -> None:
        """Release the ports and remove Ray's directory, with a warning if that fails. Ray's processes have ended."""
        self._claimed.release()
        with contextlib.suppress(OSError):  # something was compiled
            _inductor_cache(self._environment).rmdir()
        try:
            self.directory.remove()
        except OSError as error:
            log.warning("cannot remove %s: %s", self.directory.path, error)


def _make_directory(prefix: str) -> NodeDirectory:
    try:
        return NodeDirectory(prefix)
    except OSError as error:
        raise RayFailedError(f"/tmp cannot be written: {error.strerror}", "mount a tmpfs: --tmpfs /tmp") from error


def _with_port(dashboard: Dashboard, ports: RayPorts) -> Dashboard:
    """The dashboard with a port: the user's, else Ray's default if it is free, else one of this job's."""
    port = dashboard.port or (_DASHBOARD_PORT if can_bind(_DASHBOARD_PORT) else ports.named["dashboard"])
    return Dashboard(dashboard.host, port)


AGENTS = ("dashboard_agent", "runtime_env_agent")
"""Programs that the raylet starts. It ends if one of them fails."""
_PROCESSES = (*AGENTS, "raylet", "gcs_server")
_MOST = 5
"""Most lines of one process."""


def last_errors(logs: Path, process: str) -> str:
    """The last errors of a process, and those of the agents that it blames."""
    errors = {process: _last(logs, process)}
    blamed = [agent for agent in AGENTS if any(agent in line for line in errors[process])]
    return _listed({agent: _last(logs, agent) for agent in blamed} | errors)


def all_errors(logs: Path, output: Path) -> str:
    """The errors in the output of one of Ray's programs, and of all processes that it started."""
    program = output.stem.replace("-", " ")
    return _listed({program: causes(read_tail(output))} | {process: _last(logs, process) for process in _PROCESSES})


def _last(logs: Path, process: str) -> list[str]:
    """The last errors of a process. Ray's older versions write those of the raylet and the GCS to `.out`."""
    output, *others = (error_lines(read_tail(logs / f"{process}.{kind}")) for kind in ("out", "err", "log"))
    return ([line for lines in others for line in lines] or output)[-_MOST:]


def _listed(errors: Mapping[str, Sequence[str]]) -> str:
    """A single line behind a colon, several below it, each with its program."""
    lines = [f"{program}: {line}" for program, lines in errors.items() for line in lines]
    return f": {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
