"""How this node's Ray directories are called: short, as the paths of Ray's sockets have 107 bytes."""

import hashlib
import re

PATTERN = "slipway-ray-*"


def directory_prefix(job_id: str, node_rank: int, chosen_port: int | None) -> str:
    """How the names begin of those that this node makes for this job.

    Two jobs with the same hosts at once need control ports of their own, which tell them apart here too.
    """
    job = re.sub(r"\+\d+", "", job_id)  # all starts of a requeued job alike, so that the next finds what one left
    return f"{PATTERN.rstrip('*')}{hashlib.sha256(f'{job} {chosen_port}'.encode()).hexdigest()[:6]}-{node_rank}-"
