"""Names of this node's Ray directories. They are short, as a socket's path has at most 107 bytes."""

import hashlib
import re

PATTERN = "slipway-ray-*"


def directory_prefix(job_id: str, node_rank: int, chosen_port: int | None) -> str:
    """The prefix of the directories that this node creates for this job.

    Two jobs on the same hosts at the same time need different control ports, so the port tells them apart here too.
    """
    job = re.sub(r"\+\d+", "", job_id)  # equal for all starts of a requeued job, so that the next finds leftovers
    return f"{PATTERN.rstrip('*')}{hashlib.sha256(f'{job} {chosen_port}'.encode()).hexdigest()[:6]}-{node_rank}-"
