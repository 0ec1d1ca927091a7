"""Whatever the variables hold, detection answers or raises DetectionError: recorded environments, damaged at random."""

import tomllib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrypoints.environments import Detection, detect
from entrypoints.environments.explicit import HEAD, HOST_FILE, HOSTS, NODES, SINGLE
from entrypoints.errors import DetectionError

RECORDED = [
    case["variables"]
    for path in sorted(Path(__file__).with_name("recorded").glob("*.toml"))
    for case in tomllib.loads(path.read_text(encoding="utf-8"))["case"]
]
NAMES = sorted({name for variables in RECORDED for name in variables})
OURS = [HOSTS, HOST_FILE, HEAD, NODES, SINGLE, "RAY_ADDRESS", "ACME_NODELIST", "ACME_HOSTS", "ACME_NPROCS", "HOSTFILE"]
DAMAGE = [
    *("", "0", "1", "2", "-1", "1:4", "9" * 5000, "٣", "x", "a,b", ",", "a b", "#", "\n", "/etc", "/nowhere"),
    *("[", "]", "n[1-2]", "n[1-", "::1", "[fd00::1]:2,[::", "a:b:c", "{}", "[]", '["a"]', '{"cluster": [], "task": 1}'),
]


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    start=st.sampled_from([{}, *RECORDED]),
    changes=st.dictionaries(st.sampled_from(NAMES + OURS), st.sampled_from(DAMAGE), max_size=3),
    dropped=st.sets(st.sampled_from(NAMES), max_size=3),
    hostname=st.sampled_from(["me", "n1", "ppo-worker-1", ""]),
)
def test_damaged_variables_never_cause_a_traceback(
    start: dict[str, str], changes: dict[str, str], dropped: set[str], hostname: str
) -> None:
    variables = {name: value for name, value in {**start, **changes}.items() if name not in dropped}
    try:
        detection = detect({**variables, "PATH": ""}, hostname)
    except DetectionError:
        return
    assert isinstance(detection, Detection)
