"""One process's view of its node, and readers of variables and host lists for environments."""

import contextlib
import functools
import ipaddress
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrypoints.environments.host_names import host_name, host_names
from entrypoints.errors import DetectionError, NodesUnknownError
from entrypoints.hostlist import compress

_PATIENCE = 5.0
"""Seconds in which a scheduler's command must answer."""
_LOCAL_ADDRESS = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """The variables, host name and files that one process sees. Files are read on demand."""

    variables: Mapping[str, str]
    hostname: str
    root: Path = Path("/")
    """The root directory of all files, so that tests can use recorded ones."""

    def lines(self, path: str) -> list[str] | None:
        """The stripped, non-empty lines of a file; None if it cannot be read here.

        A relative path starts at the working directory.
        """
        try:
            text = self.place(path).read_text(encoding="utf-8")
        except (OSError, ValueError):  # ValueError: neither this path nor this content is text
            return None
        return [line.strip() for line in text.splitlines() if line.strip()]

    def place(self, path: str) -> Path:
        """The path below the view's root; a relative one stays as it is."""
        return self.root / path.lstrip("/") if path.startswith("/") else Path(path)

    def ask(self, *command: str) -> str | None:
        """The output of a scheduler's program; None if it is missing or fails."""
        program = shutil.which(command[0], path=self.variables.get("PATH", ""))
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]], env=dict(self.variables), capture_output=True, text=True, timeout=_PATIENCE
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    @functools.cached_property
    def addresses(self) -> frozenset[str]:
        """This node's own addresses, without loopback."""
        text = "\n".join(self.lines("/proc/net/fib_trie") or ())
        ipv4 = (address for address in _LOCAL_ADDRESS.findall(text) if not address.startswith("127."))
        ipv6 = (line.split()[0] for line in self.lines("/proc/net/if_inet6") or ())
        return frozenset((*ipv4, *(str(ipaddress.IPv6Address(int(digits, 16))) for digits in ipv6))) - {"::1"}

    def is_me(self, host: str) -> bool:
        """Whether a name or address is this node's. Of names the short form decides."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host)) in self.addresses
        return host.split(".")[0].lower() == self.hostname.split(".")[0].lower()

    def place_in(self, hosts: Sequence[str]) -> int | None:
        """This node's index among the hosts: by its full name, an unambiguous short name, or an address; else None."""
        if self.hostname in hosts:
            return hosts.index(self.hostname)
        matches = [rank for rank, host in enumerate(hosts) if self.is_me(host)]
        return matches[0] if len(matches) == 1 else None

    def fully_qualified(self) -> str | None:
        """This host's full name in /etc/hosts, where the kubelet writes a pod's; None if there is none."""
        for line in self.lines("/etc/hosts") or ():
            _, *names = line.split("#")[0].split() or [""]
            if self.hostname in names:
                return next((name for name in names if name.startswith(f"{self.hostname}.")), None)
        return None


class Reader:
    """Reads variables and remembers which it used. An empty value counts as unset."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.used: dict[str, str] = {}

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set; None if none is."""
        for name in names:
            if value := self._variables.get(name, "").strip():
                self.used[name] = value
                return value
        return None

    def number(self, *names: str, longest: int = 9) -> int | None:
        """The same as a whole number of at most `longest` digits. Raises DetectionError if it is not one."""
        text = self.text(*names)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or len(text) > longest:
            name = next(name for name in names if name in self.used)
            raise DetectionError(f"{name} is {text!r}, not a whole number")
        return int(text)

    def host(self, *names: str) -> str | None:
        """The host in the first of these variables that is set, without brackets and port; None if none is.

        Raises DetectionError if it is no host.
        """
        text = self.text(*names)
        return text and host_name(text, next(name for name in names if name in self.used), number=True)

    def hosts(self, *names: str) -> tuple[str, ...]:
        """The hosts in the first of these variables that is set, in order; empty if none is. Raises DetectionError."""
        text = self.text(*names)
        if text is None:
            return ()
        name = next(name for name in names if name in self.used)
        hosts = host_names(text, name)
        self.used[name] = ",".join(hosts)  # some separate them by lines
        return hosts

    def required_host(self, *names: str, hint: str) -> str:
        """Like `host`, but raises DetectionError if none is set."""
        self.required(*names, hint=hint)
        host = self.host(*names)
        assert host is not None
        return host

    def required(self, *names: str, hint: str) -> str:
        """Like `text`, but raises DetectionError if none is set."""
        text = self.text(*names)
        if text is None:
            raise DetectionError(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set", hint=hint)
        return text

    def required_number(self, *names: str, hint: str) -> int:
        """Like `number`, but raises DetectionError if none is set: a wrong identity is worse than none."""
        self.required(*names, hint=hint)
        number = self.number(*names)
        assert number is not None
        return number


def distinct(hosts: Sequence[str]) -> tuple[str, ...]:
    """Each host once, in order of first appearance: schedulers write one line per slot."""
    return tuple(dict.fromkeys(hosts))


def rank_of(view: ProcessView, hosts: Sequence[str], source: str) -> int:
    """This node's index in a list of hosts. Raises NodesUnknownError if the list lacks this node or has it twice."""
    rank = view.place_in(hosts)
    if rank is None:
        raise NodesUnknownError(
            f"this host is {view.hostname}, which is {'ambiguous' if any(map(view.is_me, hosts)) else 'not'} in "
            f"{source}={','.join(hosts)}",
            hint=_how_to_place(hosts, source),
        )
    return rank


def _how_to_place(hosts: Sequence[str], source: str) -> str:
    """The hint for this node's rank in a list. A rank alone would not name the other nodes."""
    ranks = f"0 to {len(hosts) - 1}"
    if source.startswith("SLIPWAY_"):
        return f"set its rank with --node-rank or SLIPWAY_NODE_RANK ({ranks})"
    return f"list the nodes, and tell which of them this is: --hosts {compress(hosts)} --node-rank N ({ranks})"


def nodes_of_tasks(rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """Node count and node rank if tasks are numbered node by node, the common "block" placement.

    Raises DetectionError for any other placement, in which ranks do not tell the nodes.
    """
    if local_size < 1 or size % local_size or rank % local_size != local_rank:
        raise DetectionError(
            f"task {rank} of {size} is task {local_rank} of {local_size} on its node, which does not tell the nodes",
            hint="start one task per node (mpirun --map-by ppr:1:node, mpiexec -ppn 1, --ntasks-per-node=1)",
        )
    return size // local_size, rank // local_size
