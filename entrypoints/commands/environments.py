"""`launch environments`: the supported environments, as lines or as the page docs/environments.md."""

import argparse
import textwrap
from collections.abc import Mapping

from entrypoints.commands import Subcommand, write
from entrypoints.environments import REGISTRY

_INTRODUCTION = """# Environments

`launch environments --markdown` generates this page from `entrypoints/environments/`. Edit the classes, not this page.

`launch` tries these environments in order, and the first that is present wins. `launch explain` shows the winner with
its reason, the others that are present as runners-up, and every conflict between them. A present but malformed
environment is an error, because skipping it could start one job per node. Each start line starts one task per node;
LAUNCH stands for `launch …` in the image.

The last column names the real system under which tests start `launch` (`tests/schedulers/`, `tests/cluster/`). The
other environments are tested with variables that real systems document
(`tests/entrypoints/environments/recorded/`)."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print the page docs/environments.md")


def _run(parsed: argparse.Namespace, _variables: Mapping[str, str]) -> int:
    write(as_markdown() if parsed.markdown else as_lines())
    return 0


def as_lines() -> str:
    """Name and title of each environment, one per line, in order of precedence."""
    width = max(len(environment.name) for environment in REGISTRY)
    return "\n".join(f"{environment.name:<{width}}  {environment.title}" for environment in REGISTRY)


def as_markdown() -> str:
    """The page docs/environments.md."""
    sections = [_INTRODUCTION, _table()]
    for environment in REGISTRY:
        reads = ", ".join(f"`{name}`" for name in environment.reads) or "nothing"
        start = environment.start.replace("\n", "\n    ")
        sections.append(
            f"## {environment.title}\n\n"
            f"{_wrapped(f'Name `{environment.name}`. Reads {reads}.')}\n\n"
            f"{_wrapped(environment.caveats)}\n\n"
            f"    {start}\n\n"
            f"Source: {environment.source}"
        )
    return "\n\n".join(sections) + "\n"


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, width=118, break_long_words=False, break_on_hyphens=False)


def _table() -> str:
    rows = ["| precedence | name | environment | tested under |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {order} | `{environment.name}` | {environment.title} | {environment.run_under} |"
        for order, environment in enumerate(REGISTRY, start=1)
    ]
    return "\n".join(rows)


SUBCOMMAND = Subcommand("list the supported environments.", _add_arguments, _run)
