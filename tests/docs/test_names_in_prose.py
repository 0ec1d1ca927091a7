"""Settings, metrics and files that a page names exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from trainer.config.trees import TREES
from trainer.records.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference")
IN_THE_IMAGE = {"examples/data_preprocess/gsm8k.py"}
ROOMS = ("buildkit", "entrypoints", "trainer", "images", "tests", "benchmarks", "examples", "ci", "docs")


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every setting and section below a model, by dotted key; a mapping's entries begin with `KEY.`."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")


KEYS = {key for tree in TREES.values() for key in keys(tree)}
SECTIONS = {key for key in KEYS if "." not in key}
GROUPS = {name.split("/")[0] for name in METRICS}


def quoted(page: Path) -> list[str]:
    """Each word of the code spans of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [word.strip(",:;") for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()]


def is_module(word: str) -> bool:
    """Whether the word names a module of the trainer, or a name in one."""
    path = ROOT / word.replace(".", "/")
    return any(option.with_suffix(".py").exists() or option.is_dir() for option in (path, path.parent))


def is_metric(name: str) -> bool:
    """Whether the name is that of a metric, whose capitals stand for names of the run: time/PHASE."""
    return any(re.fullmatch(re.sub("[A-Z]+", "[a-z_]+", metric), name) for metric in METRICS)


def settings_in(page: Path) -> list[str]:
    names = [word.partition("=")[0] for word in quoted(page)]
    return [
        name
        for name in names
        if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", name) and name.split(".")[0] in SECTIONS and not is_module(name)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_exist(page: Path) -> None:
    verl = page == ROOT / "docs/guides/verl.md"  # names verl's settings beside ours
    unknown = {name for name in settings_in(page) if name not in KEYS}
    assert verl or unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_exist(page: Path) -> None:
    names = {word for word in quoted(page) if re.fullmatch(r"[a-z]+/[a-z_]+", word) and word.split("/")[0] in GROUPS}
    assert {name for name in names if not is_metric(name) and not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_exist(page: Path) -> None:
    names = [word for word in quoted(page) if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", word) and "/" in word]
    files = {name for name in names if name.split("/")[0] in ROOMS and name not in IN_THE_IMAGE}
    assert {name for name in files if not (ROOT / name).exists() and not is_metric(name)} == set()


def test_the_pages_name_many() -> None:
    assert sum(len(settings_in(page)) for page in PAGES) > 100
