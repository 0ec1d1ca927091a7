"""The environment of child processes: the image's variables and writable directories, without the secrets."""

import os
import pwd
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.errors import UsageError
from entrypoints.host.network.fabric_settings import Setting, apply
from entrypoints.host.proxies import past_proxies
from entrypoints.options import TOKEN, TOKEN_FILE

CACHE_DIR = "SLIPWAY_CACHE_DIR"
CACHES = {
    "XDG_CACHE_HOME": "xdg",
    "HF_HOME": "huggingface",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "VLLM_CACHE_ROOT": "vllm",
    "MPLCONFIGDIR": "matplotlib",
}
"""The variables that move each library's cache, and its folder below the cache directory."""

_OF_OTHER_LAUNCHERS = ("SLURM_", "PMI", "OMPI_", "MPI", "PRTE_", "PALS_", "MV2_")


def child_environment(variables: Mapping[str, str], settings: Sequence[Setting] = ()) -> dict[str, str]:
    """The environment of every child: the user's variables, then those of host and image, then ours.

    Raises UsageError if no cache directory can be written.
    """
    environment = apply(variables, settings)
    environment.pop(TOKEN, None)
    environment.pop(TOKEN_FILE, None)
    return for_any_user(environment) | past_proxies(environment)


def for_any_user(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with writable places, and a home and user name for a user without an entry in /etc/passwd.

    Raises UsageError if no cache directory can be written.
    """
    return writable_places(environment) | dict(environment) | _home(environment)


def writable_places(environment: Mapping[str, str]) -> dict[str, str]:
    """Cache variables, if the home directory is not writable or the user chose a cache directory; else none."""
    if CACHE_DIR not in environment and _home_is_writable(environment):
        return {}
    root = cache_directory(environment)
    return {name: str(root / folder) for name, folder in CACHES.items()}


def cache_directory(environment: Mapping[str, str]) -> Path:
    """The directory for caches, which exists afterwards. Raises UsageError."""
    root = _cache_root(environment)
    _make_private(root, chosen=CACHE_DIR in environment)
    return root


def _home(environment: Mapping[str, str]) -> dict[str, str]:
    """HOME if it is not writable, and a user name if /etc/passwd lacks this user id: `getpass.getuser()` needs one."""
    values = {}
    if not _home_is_writable(environment):
        home = _cache_root(environment) / "home"
        home.mkdir(exist_ok=True)
        values["HOME"] = str(home)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        values |= {name: environment.get(name) or f"uid{os.getuid()}" for name in ("USER", "LOGNAME")}
    return values


def _cache_root(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(CACHE_DIR) or f"/tmp/slipway-{os.getuid()}")


def _home_is_writable(environment: Mapping[str, str]) -> bool:
    home = environment.get("HOME", "")
    return home not in ("", "/") and os.access(home, os.W_OK | os.X_OK)


def _make_private(directory: Path, *, chosen: bool) -> None:
    """Create it for this user only. Our default name is predictable: what others may have put there is refused."""
    hint = f"set {CACHE_DIR} to a writable directory"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if not directory.is_symlink():
            raise UsageError(f"cannot create {directory}: {error.strerror}", hint) from error
    if not chosen and (problem := open_to_others(directory)):
        raise UsageError(f"{directory} {problem}", f"remove it, or set {CACHE_DIR} to another directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{directory} is not writable", hint)


def open_to_others(directory: Path) -> str:
    """How others may have put files into a folder in a place like /tmp, as a clause; empty if they cannot have.

    A library runs the code that it finds in its cache.
    """
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if status.st_uid != os.getuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022:
        return f"can be written by others (mode {status.st_mode & 0o777:o})"
    return ""


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of Slurm and MPI: MPI_Init below Ray would join the job around `launch`."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_OTHER_LAUNCHERS)}
