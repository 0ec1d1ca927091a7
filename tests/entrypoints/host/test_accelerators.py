"""One row per accelerator: no other file names a target or a vendor."""

import ast
from collections.abc import Iterator

from entrypoints.host.accelerators import ACCELERATORS, accelerator_of, may_use_gpus
from tests.entrypoints.conftest import REPOSITORY


def string_literals() -> Iterator[tuple[str, str]]:
    """Each file of `entrypoints` outside the table, with the strings of its code."""
    for path in (REPOSITORY / "entrypoints").rglob("*.py"):
        if path.name != "accelerators.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path.name, node.value


def test_no_other_file_names_a_target_or_a_vendor() -> None:
    names = {name for row in ACCELERATORS for name in (row.target, row.vendor.lower(), row.component)}
    assert [(file, text) for file, text in string_literals() if text.lower() in names] == []


def test_targets_and_prefixes_tell_the_rows_apart() -> None:
    assert len({row.target for row in ACCELERATORS}) == len(ACCELERATORS)
    assert len({row.architecture_prefix for row in ACCELERATORS}) == len(ACCELERATORS)


def test_the_cpu_image_has_no_accelerator_and_a_checkout_accepts_any() -> None:
    assert accelerator_of("cpu") is accelerator_of(None) is None
    assert (may_use_gpus("cpu"), may_use_gpus("cuda"), may_use_gpus(None)) == (False, True, True)
