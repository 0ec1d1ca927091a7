"""The page of GPU benchmarks is what its rows say: nobody edits a figure by hand, or forgets to write it."""

import shutil
from pathlib import Path

from benchmarks.gpu import table


def test_the_committed_page_is_that_of_the_measured_rows(tmp_path: Path) -> None:
    copy = tmp_path / table.PAGE.name
    shutil.copy(table.PAGE, copy)
    table.write(table.all_rows([table.MEASURED]), copy)
    assert copy.read_text(encoding="utf-8") == table.PAGE.read_text(encoding="utf-8")
