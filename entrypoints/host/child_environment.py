"""The environment variables that children get: the image's settings, places to write, and none of the secrets."""

import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.errors import UsageError
from entrypoints.host.fabric_settings import Setting, apply
from entrypoints.options import TOKEN, TOKEN_FILE

CACHE_DIR = "SLIPWAY_CACHE_DIR"
CACHES = {
    "XDG_CACHE_HOME": "xdg",
    "HF_HOME": "huggingface",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "MPLCONFIGDIR": "matplotlib",
}
"""Variables that move a library's cache, and the folder of each below the cache directory."""

_OF_OTHER_LAUNCHERS = ("SLURM_", "PMI", "OMPI_", "MPI", "PRTE_", "PALS_", "MV2_")


def child_environment(variables: Mapping[str, str], settings: Sequence[Setting] = ()) -> dict[str, str]:
    """What every child starts from: the user's variables outrank the image's, the host's and ours.

    Raises UsageError if there is no place to write.
    """
    environment = apply(variables, settings)
    environment.pop(TOKEN, None)
    environment.pop(TOKEN_FILE, None)
    return writable_places(environment) | environment | _home(environment)


def writable_places(environment: Mapping[str, str]) -> dict[str, str]:
    """Where libraries may write, if the home directory is no place for that or the user chose another."""
    if CACHE_DIR not in environment and _home_is_writable(environment):
        return {}
    root = _cache_root(environment)
    _make_private(root, chosen=CACHE_DIR in environment)
    return {name: str(root / folder) for name, folder in CACHES.items()}


def _home(environment: Mapping[str, str]) -> dict[str, str]:
    """A home and a name for a user id that the image does not know; `getpass.getuser()` fails without."""
    found = {}
    if not _home_is_writable(environment):
        home = _cache_root(environment) / "home"
        home.mkdir(exist_ok=True)
        found["HOME"] = str(home)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        found |= {name: environment.get(name) or f"uid{os.getuid()}" for name in ("USER", "LOGNAME")}
    return found


def _cache_root(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(CACHE_DIR) or f"/tmp/slipway-{os.getuid()}")


def _home_is_writable(environment: Mapping[str, str]) -> bool:
    home = environment.get("HOME", "")
    return home not in ("", "/") and os.access(home, os.W_OK | os.X_OK)


def _make_private(directory: Path, *, chosen: bool) -> None:
    """Create it for this user only. The name that we choose is predictable, so somebody else's folder is refused."""
    hint = f"set {CACHE_DIR} to a writable directory"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = chosen or directory.stat().st_uid == os.getuid()
    except OSError as error:
        raise UsageError(f"cannot create {directory}: {error.strerror}", hint) from error
    if not (owned and os.access(directory, os.W_OK | os.X_OK)):
        raise UsageError(f"{directory} is not this user's to write", hint)


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop the variables of Slurm and MPI: an MPI_Init below Ray would join the job that started `launch`."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_OTHER_LAUNCHERS)}
