"""The run-time environment tables: their format, and the values they give on known hosts."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import MatrixError
from buildkit.recipe.dockerfile import image_manifest, render_dockerfile
from buildkit.recipe.environment import FABRICS, VERSIONED, EnvEntry, parse_environment
from buildkit.recipe.lock import Lock
from buildkit.recipe.matrix import Matrix
from entrypoints.host.settings import table_settings

HERE = Path("images/env/test.toml")
ENTRY = {"name": "NCCL_PROTO", "value": "Simple", "reason": "because", "source": "https://example.org"}
MI300_RECIPE = {
    "HSA_NO_SCRATCH_RECLAIM": "1",
    "RCCL_MSCCL_ENABLE": "0",
    "GPU_MAX_HW_QUEUES": "2",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "NCCL_PROTO": "Simple",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CHECKS_DISABLE": "1",
    "NCCL_CROSS_NIC": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def environment(entries: tuple[EnvEntry, ...], **facts: str) -> dict[str, str]:
    """The environment that `launch` derives from the table on a host with these facts; others are unknown."""
    architectures = [facts.pop("arch")] if "arch" in facts else []
    fabric = facts.pop("fabric", "")
    settings = table_settings([asdict(entry) for entry in entries], architectures, facts, fabric)
    return {setting.name: setting.value for setting in settings}


def parse(**changes: Any) -> EnvEntry:
    values = {**ENTRY, **changes}
    (entry,) = parse_environment({"env": [{key: value for key, value in values.items() if value is not None}]}, HERE)
    return entry


def test_mi300_with_the_recipes_rocm_gets_the_published_values(matrix: Matrix) -> None:
    values = environment(matrix.env("rocm"), arch="gfx942", rocm="6.2.0", nccl="2.20.5", fabric="roce", ray="2.40.0")
    assert MI300_RECIPE.items() <= values.items()
    assert values["NCCL_IB_TIMEOUT"] == "20"
    assert values["RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES"] == "1"


def test_mi300_with_a_current_rocm_drops_obsolete_workarounds(matrix: Matrix) -> None:
    values = environment(matrix.env("rocm"), arch="gfx942", rocm="7.2.1", nccl="2.27.7", fabric="roce", ray="2.60.0")
    assert not {"HSA_NO_SCRATCH_RECLAIM", "RCCL_MSCCL_ENABLE", "NCCL_PROTO", "NCCL_IB_TIMEOUT"} & set(values)
    assert values["NCCL_MIN_NCHANNELS"] == "112"
    assert values["RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("arch", "rocm", "expected"),
    [
        ("gfx942", "6.3.4", True),
        ("gfx942", "6.4.0", False),
        ("gfx950", "7.1.1", True),
        ("gfx942", "7.2.0", False),
        ("gfx90a", "7.12", False),
        ("gfx90a", "7.13", True),
    ],
)
def test_scratch_reclaim_follows_architecture_and_rocm(matrix: Matrix, arch: str, rocm: str, expected: bool) -> None:
    assert ("HSA_NO_SCRATCH_RECLAIM" in environment(matrix.env("rocm"), arch=arch, rocm=rocm)) is expected


def test_only_libfabric_hosts_get_its_provider(matrix: Matrix) -> None:
    assert environment(matrix.env("cuda"), fabric="efa")["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in environment(matrix.env("cuda"), fabric="infiniband")


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_no_table_contains_debug_values_or_values_of_the_host(matrix: Matrix, target: str) -> None:
    names = {entry.name for entry in matrix.env(target)}
    assert not {name for name in names if "DEBUG" in name or name.endswith(("_HCA", "_IFNAME", "_GID_INDEX"))}


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_only_unconditional_values_are_baked(matrix: Matrix, target: str) -> None:
    dockerfile = render_dockerfile(matrix, matrix.variant(target), "registry", {})
    for entry in matrix.env(target):
        baked = f"ENV {entry.name}={entry.value}" in dockerfile
        assert baked or not entry.always, entry.name
        if not any(other.always for other in matrix.env(target) if other.name == entry.name):
            assert not baked, entry.name


def test_manifest_carries_name_value_when_reason_source(matrix: Matrix) -> None:
    entries = image_manifest(matrix, matrix.variant("rocm"), "registry", Lock())["env"]
    assert {tuple(entry) for entry in entries} == {("name", "value", "when", "reason", "source")}
    msccl = next(entry for entry in entries if entry["name"] == "RCCL_MSCCL_ENABLE")
    assert msccl["when"] == {"rocm": "<7.1.1"}


def test_absent_and_empty_conditions_mean_always() -> None:
    assert parse().always
    assert parse(when={}).always
    assert not parse(when={"ray": ">=2.45"}).always


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"when": {"colour": "red"}}, ("when.colour", "unknown key")),
        ({"when": {"rocm": "7.1"}}, ("when.rocm", "'7.1'")),
        ({"when": {"rocm": "~=7.1"}}, ("when.rocm", "'~=7.1'")),
        ({"when": {"cuda": ["13.0"]}}, ("when.cuda", "specifier")),
        ({"when": {"ray": ">=2.45,"}}, ("when.ray", "specifier")),
        ({"when": {"arch": "gfx942"}}, ("when.arch", "not a list")),
        ({"when": {"arch": []}}, ("when.arch", "not a list")),
        ({"when": {"arch": ["MI300"]}}, ("when.arch", "'MI300'")),
        ({"when": {"fabric": ["infiband"]}}, ("when.fabric", "'infiband'")),
        ({"when": "always"}, ("`when` is not a table",)),
        ({"condition": "always"}, ("unknown key `condition`",)),
        ({"value": 1}, ("`value`",)),
        ({"reason": ""}, ("`reason`",)),
        ({"source": "somebody said so"}, ("`source`",)),
        ({"name": "nccl proto"}, ("`name`",)),
    ],
)
def test_a_malformed_entry_names_file_entry_and_key(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(MatrixError) as caught:
        parse(**changes)
    message = str(caught.value)
    assert f"{HERE}: env 1" in message
    assert all(word in message for word in words), message
    assert caught.value.hint


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(MatrixError, match="unknown table `environment`"):
        parse_environment({"environment": []}, HERE)


def test_two_entries_of_one_name_need_two_conditions() -> None:
    with pytest.raises(MatrixError, match="NCCL_PROTO appears twice"):
        parse_environment({"env": [ENTRY, ENTRY]}, HERE)
    assert len(parse_environment({"env": [ENTRY, {**ENTRY, "when": {"rocm": "<7"}}]}, HERE)) == 2


def test_a_broken_file_is_named_with_its_line(project: Path) -> None:
    (project / "images" / "env" / "cpu.toml").write_text("[[env]]\nname = \n")
    with pytest.raises(MatrixError, match=r"cpu\.toml.*line 2"):
        Matrix(project, {}).env("cpu")


release = st.lists(st.integers(0, 99), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
specifier = st.lists(
    st.tuples(st.sampled_from([">=", "<=", "==", "!=", ">", "<"]), release).map("".join), min_size=1, max_size=3
).map(",".join)


@given(
    when=st.fixed_dictionaries(
        {},
        optional={
            "arch": st.lists(st.from_regex(r"gfx[0-9a-f]{3,4}|sm_[0-9]{2,3}", fullmatch=True), min_size=1),
            "fabric": st.lists(st.sampled_from(FABRICS), min_size=1),
            **dict.fromkeys(VERSIONED, specifier),
        },
    )
)
def test_every_valid_condition_is_kept_unchanged(when: dict[str, Any]) -> None:
    assert parse(when=when).when == when
