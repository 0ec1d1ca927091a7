"""Which directory the job's nodes share, for the head's note."""

from collections.abc import Mapping
from pathlib import Path

from entrypoints.environments.base import scheduler_job_id
from entrypoints.host.file_systems import NETWORK_FILE_SYSTEMS, file_system
from entrypoints.host.tree import Tree
from entrypoints.options import JOB_DIR, TOKEN, TOKEN_FILE

PRIVATE = ".slipway"
"""The folder in the user's home."""


def job_directory(variables: Mapping[str, str], tree: Tree) -> Path | None:
    """The user's directory, else `~/.slipway` if no token is set and the nodes share home; None without either."""
    if chosen := variables.get(JOB_DIR):
        return Path(chosen)
    if variables.get(TOKEN) or variables.get(TOKEN_FILE):
        return None
    return shared_home(variables, tree)


def shared_home(variables: Mapping[str, str], tree: Tree) -> Path | None:
    """`~/.slipway`, if home is on a network file system and the scheduler provides a job id; else None."""
    home = variables.get("HOME", "")
    if not home or scheduler_job_id(variables) is None or file_system(home, tree) not in NETWORK_FILE_SYSTEMS:
        return None
    return Path(home, PRIVATE)
