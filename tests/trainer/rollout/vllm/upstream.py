"""The source of vLLM's functions, read without importing vLLM. As a program it prints what changed between two releases
in the functions that patches depend on: `upstream.py OLD NEW`, two folders of the package."""

import ast
import difflib
import importlib.util
import sys
from pathlib import Path

from trainer.rollout.vllm.patches import PATCHES


def installed() -> Path:
    """The folder of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def source(package: Path, place: str) -> str | None:
    """The source of a function or class, as `file: Class.method`; None if the package has none of that name."""
    file, _, name = place.partition(": ")
    path = package / file
    if not path.is_file():
        return None
    text = path.read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        children = [child for child in ast.walk(node) if isinstance(child, named) and child.name == part]
        if not children:
            return None
        node = children[0]
    return ast.get_source_segment(text, node)


def changes(old: Path, new: Path) -> list[str]:
    """A unified diff of each function that differs, under the names of the patches."""
    places: dict[str, list[str]] = {}
    for name, patch in PATCHES.items():
        for place in (patch.because[0], *patch.depends_on):
            names = places.setdefault(place, [])
            names += [name] if name not in names else []
    diffs = []
    for place, names in places.items():
        before, after = source(old, place), source(new, place)
        if before != after:
            lines = [(text or "").splitlines() for text in (before, after)]
            body = "\n".join(difflib.unified_diff(*lines, "old", "new", lineterm=""))
            diffs.append(f"{place} ({', '.join(names)})\n{body}\n")
    return diffs


if __name__ == "__main__":
    for diff in changes(Path(sys.argv[1]), Path(sys.argv[2])):
        sys.stdout.write(f"{diff}\n")
