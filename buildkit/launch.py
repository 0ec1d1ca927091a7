"""The host's `launch` and `trainer`: start the code of the project that buildkit came with, as images do."""

import os
import sys
from typing import NoReturn

from buildkit.errors import MatrixError
from buildkit.recipe.project import own_project


def launch() -> NoReturn:
    _become("entrypoints")


def trainer() -> NoReturn:
    _become("trainer")


def _become(package: str) -> NoReturn:
    """Replaces this process. Programs that `launch` starts find `trainer` by the same PYTHONPATH."""
    try:
        project = own_project()
    except MatrixError as error:
        sys.stderr.write(f"error: {error}\n\nhint: {error.hint}\n")
        sys.exit(error.exit_code)
    paths = (str(project), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execv(sys.executable, [sys.executable, "-P", "-m", package, *sys.argv[1:]])
