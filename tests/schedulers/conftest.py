"""Slurm's own programs, without a cluster; `ci/setup` installs them on Debian."""

import shutil
from pathlib import Path

import pytest

SLURM_CONF = """
ClusterName=none
SlurmctldHost=localhost
AuthType=auth/none
CredType=cred/none
NodeName=localhost
PartitionName=all Nodes=ALL
"""


@pytest.fixture(scope="session")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The program, and the environment in which it needs no controller."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.fail("scontrol is missing: run ci/setup, which installs Debian's slurm-client")
    configuration: Path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    configuration.write_text(SLURM_CONF, encoding="ascii")
    return program, {"SLURM_CONF": str(configuration)}
