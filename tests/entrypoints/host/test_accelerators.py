"""One row per accelerator: no other file names a target or a vendor."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoints.host.accelerators import ACCELERATORS, accelerator_of, may_use_gpus
from entrypoints.host.network.fabric_settings import apply
from entrypoints.host.settings import examine_host
from entrypoints.host.tree import Tree
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


@pytest.mark.parametrize(
    ("variables", "value"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, "0,1"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1f2e3d4c5b6a7988"}, "0"),
        ({"ROCR_VISIBLE_DEVICES": "NoDevFiles"}, ""),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, None),
        ({"HIP_VISIBLE_DEVICES": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, None),
        ({}, None),
    ],
)
def test_ray_is_told_of_restrictions_that_it_does_not_read(
    tmp_path: Path, variables: dict[str, str], value: str | None
) -> None:
    settings = examine_host(Tree(tmp_path), variables).settings
    assert {setting.name: setting.value for setting in settings}.get("HIP_VISIBLE_DEVICES") == value


def test_ray_counts_the_gpus_that_a_scheduler_left(tmp_path: Path) -> None:
    manager = pytest.importorskip("ray._private.accelerators.amd_gpu").AMDGPUAcceleratorManager
    variables = {"ROCR_VISIBLE_DEVICES": "2,3"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HIP_VISIBLE_DEVICES", raising=False)
        patch.setenv("ROCR_VISIBLE_DEVICES", "2,3")
        with pytest.raises(RuntimeError, match="Please use HIP_VISIBLE_DEVICES"):
            manager.get_current_process_visible_accelerator_ids()
        for name, text in apply(variables, examine_host(Tree(tmp_path), variables).settings).items():
            patch.setenv(name, text)
        assert manager.get_current_process_visible_accelerator_ids() == ["0", "1"]
