"""`stall.html`: a page about the latest hang of a run."""

import logging
from datetime import UTC, datetime
from pathlib import Path

from trainer.cluster.stalls.explanation import Explanation, place, position
from trainer.cluster.stalls.reading import Reading
from trainer.errors import DataError

logger = logging.getLogger(__name__)

PAGE = "stall.html"


def write_stall(run_dir: Path, method: str, seconds: float, explanation: Explanation, reading: Reading) -> Path | None:
    """Writes the page into the run's directory; its path, or None if it cannot be written, as on a full disk."""
    from trainer.records.pages.page import write_page  # workers import this module and write no page

    path = run_dir / PAGE
    try:
        write_page(
            path,
            "stall.html.j2",
            title=f"No progress in {method}",
            seconds=seconds,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            run=run_dir.name,
            explanation=explanation,
            workers=[
                (
                    call,
                    standing,
                    position(standing.threads[0], standing.busy) if call.probe is None else place(standing),
                )
                for call, standing in reading.standings.items()
            ],
            hosts=reading.hosts,
        )
    except DataError as error:
        logger.warning("%s", error)
        return None
    return path
