"""The reference pages match the code."""

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from trainer.config.trees import TREES
from trainer.records.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"


def pages() -> dict[str, Callable[[], str]]:
    spec = importlib.util.spec_from_file_location("generate", REFERENCE / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Callable[[], str]] = module.PAGES
    return made


@pytest.mark.parametrize("name", pages())
def test_page_matches_the_code(name: str) -> None:
    written = (REFERENCE / name).read_text(encoding="utf-8")
    assert written == pages()[name](), "run: python docs/reference/generate.py"


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_setting_of_every_command_is_listed_under_its_full_name() -> None:
    page = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    names = {name for tree in TREES.values() for name in setting_names(tree)}
    assert len(names) > 200
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_percent_signs_stand_as_in_the_terminal() -> None:
    assert "%%" not in pages()["commands.md"]()


METRIC = re.compile(
    r"(actor|critic|reward|rollout|validation|reference|time|throughput|gpu|engines|checkpoint|memory|dpo|kto|sft)"
    r"/[a-z_]*[a-z]"
)


def names_in_the_trainer() -> Iterator[tuple[str, str]]:
    """Each string of the trainer's code that looks like a metric and is not a directory, with its file."""
    for text, file in strings_in_the_trainer():
        if METRIC.fullmatch(text) and not (ROOT / "trainer" / text).exists():
            yield text, file


def strings_in_the_trainer() -> Iterator[tuple[str, str]]:
    """Each string of the trainer's code outside the table of metrics, with its file."""
    for file in (ROOT / "trainer").rglob("*.py"):
        if file.name == "metrics.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value, str(file.relative_to(ROOT))


def phases_in_the_trainer() -> set[str]:
    """Every timed phase: `with phase("generate")` records time/generate."""
    return {
        f"time/{name}"
        for file in (ROOT / "trainer").rglob("*.py")
        if file.name != "warm_start.py"  # shows its phases on the console and records no metrics
        for name in re.findall(r"phase\(\"([a-z_]+)\"\)", file.read_text(encoding="utf-8"))
    }


def test_every_metric_in_the_code_is_explained() -> None:
    assert {(name, file) for name, file in names_in_the_trainer() if name not in METRICS} == set()
    assert phases_in_the_trainer() - set(METRICS) == set()


def test_every_explained_metric_is_in_the_code() -> None:
    """Roles and phases prefix a metric's last part with their names."""
    texts = {text for text, _ in strings_in_the_trainer()}
    written = [
        name for name in METRICS if not re.search("NAME|SOURCE|PHASE|ROLE|CAUSE|/N$", name)
    ]  # names of the user, the data …
    assert not [name for name in written if name not in texts and name.split("/")[1] not in texts]
