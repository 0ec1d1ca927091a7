"""The page of results: a benchmark rewrites only its own section."""

from pathlib import Path

from benchmarks.results import write_section


def test_a_section_replaces_only_its_older_version(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    write_section("One", "first\n\n### inside\n", page)
    write_section("Two", "second", page)
    write_section("One", r"newer \1", page)
    assert page.read_text() == "# Results\n\n## One\n\nnewer \\1\n\n## Two\n\nsecond\n"
