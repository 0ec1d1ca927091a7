"""What is broken in a soak, in this order."""

from tests.chaos.jobs import FAULTS as CHAOS
from tests.chaos.jobs import KILL, STOP, Fault, codes

ENGINE, REWARDS = r"^ray::RolloutWor", r"^ray::RewardWork"

_named = {fault.name: fault for fault in CHAOS}
FAULTS = (
    Fault("engine killed", "any", ENGINE, [KILL], codes(), ""),
    _named["rank killed"],
    Fault("reward worker killed", "any", REWARDS, [KILL], codes(), ""),
    _named["worker node killed"],
    Fault("engine stopped", "any", ENGINE, [STOP], codes(), ""),
    _named["SIGTERM"],
)
"""A fault without exit codes does not end the job."""
