"""Links between pages that mkdocs does not check: those outside of docs/, and those of docs/ into the repository."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = re.compile(r"https://github\.com/slipway-rl/slipway/(?:blob|tree)/main/(.+)")
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
PAGES = [Path(name) for name in LISTED.splitlines() if (ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def linked_files(page: Path) -> list[tuple[Path, str]]:
    """The files of the repository that a page links to, each with the anchor in it."""
    targets = []
    for link in re.findall(r"\]\(<?([^)\s>]+)", (ROOT / page).read_text(encoding="utf-8")):
        if match := REPOSITORY.fullmatch(link):
            name, _, anchor = match[1].partition("#")
            targets.append((ROOT / name, anchor))
        elif not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            targets.append(((ROOT / page.parent / name) if name else ROOT / page, anchor))
    return targets


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_to_files_of_the_repository_lead_somewhere(page: Path) -> None:
    for target, anchor in linked_files(page):
        assert target.exists(), f"{page} links to {target}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page} links to {target}#{anchor}"
