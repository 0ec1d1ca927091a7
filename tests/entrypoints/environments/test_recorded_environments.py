"""Recorded environments of real systems, `recorded/*.toml`, each with its source."""

import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from entrypoints.commands.environments import as_markdown
from entrypoints.commands.explain import explain
from entrypoints.environments import REGISTRY, detect
from entrypoints.host.settings import examine_host
from entrypoints.host.tree import Tree
from tests.entrypoints.conftest import REPOSITORY

CASES = [
    pytest.param(case, id=f"{path.stem}: {case['name']}")
    for path in sorted(Path(__file__).with_name("recorded").glob("*.toml"))
    for case in tomllib.loads(path.read_text(encoding="utf-8"))["case"]
]
WITHOUT_RECORD = {"explicit", "compose", "single"}
"""These need no other system, or a name server: see test_environments.py."""


def recorded_place(case: dict[str, Any], root: Path) -> dict[str, str]:
    """Lay out the case's files and programs below `root`; returns its variables."""
    for name, text in case.get("files", {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    programs = root / "programs"
    programs.mkdir()
    for name, script in case.get("programs", {}).items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (programs / name).chmod(stat.S_IRWXU)
    return {**case["variables"], "PATH": str(programs)}


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_environment_is_understood(case: dict[str, Any], tmp_path: Path) -> None:
    detection = detect(recorded_place(case, tmp_path), case["hostname"], tmp_path)
    document = explain(detection, examine_host(Tree(tmp_path), {}), {}, None, [])
    expected = {name: None if value == "none" else value for name, value in case["expect"].items()}
    assert {name: document[name] for name in expected} == expected
    failures = [f"{failure['message']}; {failure['hint']}" for failure in document["failures"]]
    told = "\n".join((*document["warnings"], *failures))
    assert case.get("warning", "") in told
    assert (", but only this process was started" in told) <= ("warning" in case)
    assert (", but this process runs on another host" in told) <= ("warning" in case)


def test_every_environment_has_a_record_with_its_source() -> None:
    recorded = {case.values[0]["expect"]["environment"] for case in CASES}  # type: ignore[index,call-overload]
    assert recorded | WITHOUT_RECORD == {environment.name for environment in REGISTRY}
    for path in Path(__file__).with_name("recorded").glob("*.toml"):
        assert tomllib.loads(path.read_text(encoding="utf-8"))["source"].startswith("https://")


def test_the_page_of_environments_is_current() -> None:
    page = (REPOSITORY / "docs" / "environments.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "run: launch environments --markdown > docs/environments.md"
