"""Host names and addresses, as users, host files and services write them."""

import ipaddress
import re

from entrypoints.errors import DetectionError
from entrypoints.hostlist import LONGEST_NAME, HostlistError, expand

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_SHOWN = 40
"""Characters of a name in an error."""
_SCHEME = re.compile(r"[a-z][a-z0-9+]*://")
_BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(\d+))?")
_WITH_NUMBER = re.compile(r"([^:]+):(\d+)")
_SEPARATOR = re.compile(r"[\s,;]+")


def host_name(word: str, source: str, *, number: bool = False) -> str:
    """A host name or an address: `gpu-0`, `10.0.0.1`, and IPv6 with or without brackets.

    With `number` it may be followed by a port or a count of slots, and preceded by a scheme: `tcp://[fd00::1]:29500`.
    Raises DetectionError, naming the source, for others.
    """
    name, told = _split(word.strip())
    if told and not number:
        name = word
    if len(name) > LONGEST_NAME:
        raise DetectionError(
            f"{source}: {name[:_SHOWN]!r}… has {len(name)} characters, a host name has at most {LONGEST_NAME}",
            hint="separate the names by commas, or lines of a file",
        )
    if is_address(name):
        return str(ipaddress.ip_address(name))
    if not _NAME.fullmatch(name):
        raise DetectionError(f"{source}: {word!r} is not a host name", hint="write names or addresses alone")
    return name


def host_names(text: str, source: str) -> tuple[str, ...]:
    """The hosts that a service lists, separated by commas, semicolons or white space, without ports or slots.

    Raises DetectionError, naming the source, for a word that is no host.
    """
    return tuple(host_name(word, source, number=True) for word in _SEPARATOR.split(text) if word)


def is_address(text: str) -> bool:
    """Whether the text is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a name or address leads every node to itself."""
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"


def without_number(word: str) -> str:
    """`host` of `host:8` and `[fd00::1]:8`, whose number is a port or a count of slots; other words unchanged."""
    return _split(word)[0]


def _split(word: str) -> tuple[str, bool]:
    """The host that a word names, and whether anything but brackets stands around it."""
    bare = _SCHEME.sub("", word, count=1)
    if match := _BRACKETED.fullmatch(bare):
        return match[1], bare != word or match[2] is not None
    if match := _WITH_NUMBER.fullmatch(bare):
        return match[1], True
    return bare, bare != word


def in_list(text: str, source: str) -> tuple[str, ...]:
    """The hosts of `a,b`, `[fd00::1],[fd00::2]` or `gpu-[0-3]`. Raises DetectionError, naming the source."""
    if "[" in text and not _BRACKETED.search(text):
        try:
            hosts = tuple(expand(text))
        except HostlistError as error:
            raise DetectionError(f"{source} is {text!r}: {error}") from error
    else:
        hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts):
        raise DetectionError(f"{source} is {text!r}: a host name is empty", hint=f"write {source}=head,worker-1")
    if blank := next((host for host in hosts if len(host.split()) > 1), None):
        raise DetectionError(f"{source}: {blank!r} is not a host name", hint="separate the names by commas")
    hosts = tuple(host_name(host, source) for host in hosts)
    names = [host.lower() for host in hosts]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise DetectionError(f"{source} is {text!r}: {min(repeated)} is listed twice")
    return hosts


def in_file(lines: list[str], source: str) -> tuple[str, ...]:
    """The hosts of an MPI host file or a scheduler's node file, each once: the first word of each line, without slots
    (`host:8`, `host slots=8`).

    Raises DetectionError, naming the source, for a word that is no host.
    """
    words = [line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip()]
    hosts: dict[str, str] = {}
    for word in words:
        name = host_name(word, source, number=True)
        hosts.setdefault(name.lower(), name)
    return tuple(hosts.values())
