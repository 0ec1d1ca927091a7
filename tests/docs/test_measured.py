"""The pages of GPU benchmarks are what their rows say: nobody edits a figure by hand, or forgets to write it."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import table
from benchmarks.gpu.claims import page as claims


@pytest.mark.parametrize(("page", "write"), [(table.PAGE, table.write), (claims.PAGE, claims.write)])
def test_the_committed_page_is_that_of_the_measured_rows(
    page: Path, write: Callable[[Sequence[table.Row], Path], None], tmp_path: Path
) -> None:
    copy = tmp_path / page.name
    shutil.copy(page, copy)
    write(table.all_rows([table.MEASURED]), copy)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
