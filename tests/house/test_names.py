"""Names of variables say what kind of thing they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMPTY = {"found", "one", "own", "what"}
ROOMS = ("buildkit", "entrypoints", "trainer", "benchmarks", "ci", "tests")


def bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each name that is stored, received as an argument or captured by a pattern, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def test_variables_have_names_that_say_something() -> None:
    empty = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sources()
        for name, line in bound(ast.parse(file.read_text(encoding="utf-8")))
        if name in EMPTY
    ]
    assert empty == [], "name the kind of thing: match, path, candidates, item …"


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "for one in x: ...",
        "def f(own): ...",
        "[what for what in x]",
        "if (found := x): ...",
        "import a as one",
    ],
)
def test_an_empty_name_is_seen(code: str) -> None:
    assert EMPTY & {name for name, _ in bound(ast.parse(code))}


@pytest.mark.parametrize("code", ["found()", "x.own = 1", "f(one=1)", "import what"])
def test_names_of_others_do_not_count(code: str) -> None:
    assert not EMPTY & {name for name, _ in bound(ast.parse(code))}
