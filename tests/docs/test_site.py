"""A dead link or a page outside the navigation stops the site's build; the error names the page."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of the pages that a test may damage."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


BUILD = (ROOT / "ci/site").read_text(encoding="utf-8").splitlines()[-1].removeprefix("exec ").split()
"""The line by which ci/site builds: what the tests below show is true of it."""


def build(site: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", *BUILD, "--config-file", str(site / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=site)
    return done.returncode, done.stdout + done.stderr


def test_the_site_builds_and_loads_nothing_from_other_hosts(site: Path) -> None:
    status, words = build(site)
    assert status == 0, words
    start = (site / "build/site/start/index.html").read_text(encoding="utf-8")
    for tag in ('<script src="http', '<link rel="stylesheet" href="http', "fonts.googleapis"):
        assert tag not in start


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[gone](guides/gone.md)", "Doc file 'start.md' contains a link 'guides/gone.md'"),
        ("[gone](guides/slurm.md#gone)", "Doc file 'start.md' contains a link 'guides/slurm.md#gone'"),
        ("![gone](assets/gone.svg)", "Doc file 'start.md' contains a link 'assets/gone.svg'"),
    ],
)
def test_a_dead_link_stops_the_build_and_names_the_page(site: Path, line: str, message: str) -> None:
    with (site / "docs/start.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{line}\n")
    status, words = build(site)
    assert status != 0
    assert message in words


def test_a_page_that_is_missing_stops_the_build_and_is_named(site: Path) -> None:
    (site / "docs/comparison.md").unlink()
    status, words = build(site)
    assert status != 0
    assert "the target 'comparison.md' is not found" in words


def test_a_page_outside_the_navigation_stops_the_build_and_is_named(site: Path) -> None:
    (site / "docs/lonely.md").write_text("# Lonely\n", encoding="utf-8")
    status, words = build(site)
    assert status != 0
    assert "lonely.md" in words
