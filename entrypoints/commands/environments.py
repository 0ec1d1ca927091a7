"""`launch environments`: the supported environments, as lines or as the page docs/environments.md."""

import argparse
from collections.abc import Mapping

from entrypoints.commands.subcommand import Subcommand, write
from entrypoints.environments import REGISTRY

_INTRODUCTION = """# Environments

Made by `launch environments --markdown` from `entrypoints/environments/`; edit the classes, not this page.

`launch` asks these in order; the first that is there wins. What the others say is shown as runners-up, and where they
disagree, as a conflict. `launch explain` tells what it found and why. An environment that is there but malformed is an
error: falling through could start one job per node. LAUNCH stands for `launch …` in the image; every line starts one
task on each node.

The last column names the system under which tests start `launch` (`tests/schedulers/`, `tests/cluster/`); all others
are known from the variables that real systems document (`tests/entrypoints/environments/recorded/`)."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print the page docs/environments.md")


def _run(parsed: argparse.Namespace, _variables: Mapping[str, str]) -> int:
    write(as_markdown() if parsed.markdown else as_lines())
    return 0


def as_lines() -> str:
    width = max(len(environment.name) for environment in REGISTRY)
    return "\n".join(f"{environment.name:<{width}}  {environment.title}" for environment in REGISTRY)


def as_markdown() -> str:
    sections = [_INTRODUCTION, _table()]
    for environment in REGISTRY:
        reads = ", ".join(f"`{name}`" for name in environment.reads) or "nothing"
        start = environment.start.replace("\n", "\n    ")
        sections.append(
            f"## {environment.title}\n\n"
            f"Name `{environment.name}`. Reads {reads}.\n\n"
            f"Beware: {environment.beware}\n\n"
            f"    {start}\n\n"
            f"Source: {environment.source}"
        )
    return "\n\n".join(sections) + "\n"


def _table() -> str:
    rows = ["| precedence | name | environment | run for real |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {order} | `{found.name}` | {found.title} | {found.run_under} |"
        for order, found in enumerate(REGISTRY, start=1)
    ]
    return "\n".join(rows)


SUBCOMMAND = Subcommand("list the supported environments.", _add_arguments, _run)
