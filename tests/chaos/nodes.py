"""The faults of `tests.chaos.jobs` that need no Ray cluster, on jobs of `launch --no-ray`, which start in a second."""

from dataclasses import replace

from tests.chaos.injection import Kind
from tests.chaos.jobs import COMMAND, FAULTS

KINDS = tuple(
    Kind(f"{fault.name}, no Ray", replace(fault, ray=False).inject)
    for fault in FAULTS
    if fault.process in ("node", "launch", COMMAND)
)
