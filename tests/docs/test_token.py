"""Pages let people make a job's secret once: `$(openssl …)` in a line for every node would make one secret per node."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IN_ONE_SHELL = {"docs/guides/slurm.md"}
"""Pages where the line runs once, in the shell that starts the nodes."""


def test_no_page_makes_a_secret_on_each_machine() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    made = {
        str(page.relative_to(ROOT))
        for page in pages
        if re.search(r"SLIPWAY_TOKEN[= ]*[\"']?(\$\(|`openssl)", page.read_text(encoding="utf-8", errors="replace"))
    }
    assert made == IN_ONE_SHELL
