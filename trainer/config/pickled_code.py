"""Functions of a notebook or a program as text, which a process loads without their files."""

import base64
import binascii
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.errors import ConfigError

MOST = 2**20  # bytes of a pickle, which every record of the settings holds


def pickled(where: str, function: Callable[..., Any]) -> str:
    """The function with the variables and the functions that it reads, in base64. Installed packages stay imports.

    Raises ConfigError, which begins with `where`, if something cannot be pickled, or is too large.
    """
    import cloudpickle

    try:
        with _by_value(cloudpickle):
            content = cloudpickle.dumps(function)
    except Exception as error:  # an object's own code decides what it raises
        raise ConfigError(
            f"{where}: cannot be sent to the reward processes: {error}",
            hint="create what it uses, such as files, locks, clients and models, inside the function",
        ) from error
    if len(content) > MOST:
        raise ConfigError(
            f"{where}: reads variables of {len(content) / 2**20:.1f} MiB, more than 1 MiB",
            hint="let the function read large objects from a file",
        )
    return base64.b64encode(content).decode()


def unpickled(setting: str, text: str) -> Callable[..., Any]:
    """The function that `pickled` wrote. Runs code of the pickle. Raises ConfigError, which begins with `setting`."""
    import cloudpickle

    try:
        function = cloudpickle.loads(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise ConfigError(f"{setting}: not base64: {error}", hint="give the function to trainer.train") from error
    except Exception as error:  # whatever the pickle's code raises
        raise ConfigError(
            f"{setting}: cannot be loaded: {type(error).__name__}: {error}",
            hint="install what it imports on every node; Python must be of the version that wrote it",
        ) from error
    if not callable(function):
        raise ConfigError(f"{setting}: holds a {type(function).__name__}", hint="give a function to trainer.train")
    return function  # type: ignore[no-any-return]


@contextmanager
def _by_value(cloudpickle: ModuleType) -> Iterator[None]:
    """Pickles code of the user's own modules by value meanwhile: other processes may not find their files."""
    ours = [module for module in tuple(sys.modules.values()) if _is_users(module)]
    new = [module for module in ours if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


_INSTALLED = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[1]),
)


def _is_users(module: ModuleType) -> bool:
    """Whether a module is neither Python's, nor an installed package's, nor this trainer's."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if not isinstance(file, str) or name == "__main__" or name not in sys.modules:
        return False
    path = Path(file)
    if any(path.is_relative_to(parent) for parent in _INSTALLED):
        return False
    depth = name.count(".") + (path.stem == "__init__")
    return not _holds_packages(path.parents[min(depth, len(path.parents) - 1)])


@cache
def _holds_packages(directory: Path) -> bool:
    """Whether pip installed packages into the directory, such as with `--target`."""
    return any(directory.glob("*.dist-info"))
