"""Writes the measured claims as a table of benchmarks/measured/claims.md.

    python3 -m benchmarks.gpu.claims.page [FILE_OR_DIRECTORY…]

Rows are those of `benchmarks.gpu.claims`, by default of benchmarks/gpu/measured.jsonl. Of rows of the same claim, shape
and device the last one counts.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.claims.published import CLAIMS, MEASUREMENTS, Claim
from benchmarks.gpu.table import MEASURED, ROOT, Row, all_rows, markdown
from benchmarks.results import write_section

PAGE = ROOT / "benchmarks" / "measured" / "claims.md"
TITLE = "Measured"
Place = tuple[str, str]  # shape and device


def section(rows: Sequence[Row]) -> str:
    """The table of all claims with a column for each place, and where, when and on what each was measured."""
    measured_rows = {(place(row), row["claim"]): row for row in rows if row["benchmark"] == "claims" and "ours" in row}
    places = sorted({where for where, _ in measured_rows})
    lines = [
        [claim.title, claim.claimed, *(cell(claim, measured_rows.get((where, claim.measurement))) for where in places)]
        for claim in CLAIMS
    ]
    header = ["claim", "claimed", *(f"measured: {shape}, {device}" for shape, device in places)]
    return "\n\n".join([markdown(header, lines), origins(measured_rows)])


def place(row: Row) -> Place:
    cores = f"{row['cores']} cores"
    return row["shape"], cores if row["device"] == "no GPU" else f"{row['device']} and {cores}"


def cell(claim: Claim, row: Row | None) -> str:
    """Both sides' figures and how they relate; a dash if they were not measured."""
    if row is None or claim.figure not in row["baseline"] or claim.figure not in row["ours"]:
        return "-"
    baseline, ours = (row[side][claim.figure] for side in ("baseline", "ours"))
    relation = claim.relation(baseline, ours)
    return f"{baseline:,} → {ours:,} {claim.unit}: {relation}" if claim.unit else relation


def origins(measured_rows: Mapping[tuple[Place, str], Row]) -> str:
    """The command of each measurement, and the job and date of its rows."""
    lines = []
    for name in MEASUREMENTS:
        measured = [measured_rows[key] for key in sorted(measured_rows) if key[1] == name]
        told = "; ".join(f"{', '.join(place(row))}: {row['job']} ({row['date']})" for row in measured)
        lines.append([f"`python3 -m benchmarks.gpu.claims --only {name}`", told or "not measured yet"])
    return markdown(["command", "measured"], lines)


def write(rows: Sequence[Row], page: Path) -> None:
    write_section(TITLE, section(rows), page)


def main() -> None:
    write(all_rows([Path(argument) for argument in sys.argv[1:]] or [MEASURED]), PAGE)


if __name__ == "__main__":
    main()
