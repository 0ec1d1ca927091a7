"""The head's address in every spelling, in every recorded environment whose variables name it."""

import re
from pathlib import Path
from typing import Any

import pytest

from entrypoints.environments import detect
from entrypoints.environments.host_names import host_name, in_file
from entrypoints.errors import DetectionError
from tests.entrypoints.environments.test_recorded_environments import CASES, recorded_place

NO_ADDRESSES = {"slurm", "explicit", "kuberay", "lsf", "sagemaker", "leader_worker_set", "pytorchjob"}
"""Slurm and LSF know hosts by name, the user's own list has no ports, RAY_ADDRESS has one in any case; the names of
the others tell more than the host."""
SPELLINGS = ("fd00::1", "[fd00::1]", "[fd00::1]:29500", "FD00:0::1", "tcp://[fd00::1]:29500")


def whole(host: str) -> re.Pattern[str]:
    """The host as a word of its own, with or without brackets and port."""
    return re.compile(rf"(?<![\w.:-])\[?{re.escape(host)}\]?(?::\d+)?(?![\w.:-])")


def named_by_variables(case: Any) -> bool:
    expected, variables = case.values[0]["expect"], case.values[0]["variables"]
    head = expected.get("head", "none")
    texts = (text for name, text in variables.items() if name not in ("SLIPWAY_HEAD", "OMPI_MCA_orte_hnp_uri"))
    short_name = case.values[0]["hostname"].split(".")[0]
    return (
        expected["environment"] not in NO_ADDRESSES
        and head not in ("none", short_name)
        and any(whole(head).search(text) for text in texts)
    )


NAMED = [case for case in CASES if named_by_variables(case)]


def test_many_environments_name_the_head_in_a_variable() -> None:
    assert len({case.values[0]["expect"]["environment"] for case in NAMED}) >= 20  # type: ignore[index,call-overload]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("case", NAMED)
def test_the_heads_address_is_understood_in_every_spelling(case: dict[str, Any], spelling: str, tmp_path: Path) -> None:
    variables = recorded_place(case, tmp_path)
    pattern = whole(case["expect"]["head"])
    respelt = {name: pattern.sub(spelling, text) for name, text in variables.items() if name != "PATH"}
    allocation = detect({**variables, **respelt}, case["hostname"], tmp_path).allocation
    assert allocation.heads[0] == "fd00::1"
    assert allocation.hosts is None or "[" not in "".join(allocation.hosts)


@pytest.mark.parametrize(
    ("uri", "heads"),
    [
        ("1.0;tcp://10.0.0.1,10.1.0.1:34911;tcp6://[fd00::2]:54193", ("10.0.0.1", "10.1.0.1", "fd00::2")),
        ("1.0;tcp6://[fd00::2,fd00::3]:54193", ("fd00::2", "fd00::3")),
        ("1.0;tcp://127.0.0.1,10.1.0.1:34911;tcp6://[::1]:54193;usock", ("10.1.0.1",)),
    ],
)
def test_the_addresses_of_open_mpis_launcher_have_no_brackets(uri: str, heads: tuple[str, ...]) -> None:
    numbers = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in numbers.items()}
    assert detect({**variables, "OMPI_MCA_orte_hnp_uri": uri}, "me").allocation.heads == heads


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("gpu-0", "gpu-0"),
        ("gpu-0.lan.", "gpu-0.lan."),
        ("gpu-0:8", "gpu-0"),
        ("10.0.0.1:6000", "10.0.0.1"),
        ("[fe80::1%eth0]:22", "fe80::1%eth0"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        (" gpu-0 ", "gpu-0"),
    ],
)
def test_a_host_is_read_without_brackets_port_and_slots(word: str, host: str) -> None:
    assert host_name(word, "HOST", number=True) == host


@pytest.mark.parametrize(
    "word", ["", "a b", "[fd00::1", "fd00::1]", "a:b", "a:b:c", "[a]:1", "a/b", "x" * 254, "-a", "tcp://"]
)
def test_what_is_no_host_is_refused(word: str) -> None:
    with pytest.raises(DetectionError, match="HOST: "):
        host_name(word, "HOST", number=True)


def test_the_users_own_names_have_no_port() -> None:
    for variables in ({"SLIPWAY_HOSTS": "me,a:22"}, {"SLIPWAY_HOSTS": "me,[fd00::1]:22"}):
        with pytest.raises(DetectionError, match="is not a host name"):
            detect(variables, "me")
    head = {"SLIPWAY_NODES": "2", "SLIPWAY_NODE_RANK": "1"}
    assert detect({**head, "SLIPWAY_HEAD": "[fd00::1]"}, "me").allocation.head == "fd00::1"
    with pytest.raises(DetectionError, match="SLIPWAY_HEAD: 'a:22' is not a host name"):
        detect({**head, "SLIPWAY_HEAD": "a:22"}, "me")


def test_a_schedulers_node_file_may_name_addresses_and_slots() -> None:
    assert in_file(["[fd00::1]:8", "10.0.0.2 slots=4", "10.0.0.2", "gpu-3:2 # last"], "FILE") == (
        "fd00::1",
        "10.0.0.2",
        "gpu-3",
    )
