"""Names of choices that are modules of a folder."""

import pkgutil
from pathlib import Path

_TRAINER = Path(__file__).parents[1]


def module_names(folder: str) -> tuple[str, ...]:
    """The modules of a folder below `trainer/`, sorted. None of them is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(_TRAINER / folder)])))
