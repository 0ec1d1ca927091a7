"""The values that two nodes compare in the handshake."""

import time
from typing import Any

import pytest

from entrypoints.host.settings import examine_host
from entrypoints.host.tree import Tree
from entrypoints.host.versions import DISTRIBUTION, image_identity, slipway_version
from entrypoints.job.hello import check_form, reason_to_refuse, unverified
from entrypoints.wire.channel import MalformedError
from tests.entrypoints.hosts import HostTree

CUDA = {"version": "0.2.0", "target": "cuda", "variant": "cu130", "lock": "sha256:aa"}


def hello_of(**changes: Any) -> dict[str, Any]:
    said = {"rank": 1, "job_id": "5", "node_count": 2, "python": "3.12", "ray": "2.60.0", "clock": time.time()}
    return {**said, "slipway": "0.2.0", "image": image_identity(CUDA), **changes}


def test_equal_nodes_may_meet() -> None:
    assert reason_to_refuse(hello_of(), hello_of()) is None
    assert unverified(hello_of(), hello_of()) == ""


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"slipway": "0.1.0"}, "Slipway differs: 0.1.0 there, 0.2.0 on the head"),
        ({"slipway": None}, "Slipway differs: none there, 0.2.0 on the head"),
        (
            {"image": image_identity({**CUDA, "lock": "sha256:bb"})},
            "image differs: cuda/cu130 sha256:bb there, cuda/cu130 sha256:aa on the head",
        ),
        ({"image": None}, "image differs: none there, cuda/cu130 sha256:aa on the head"),
    ],
)
def test_another_version_or_image_is_refused(theirs: dict[str, Any], message: str) -> None:
    assert reason_to_refuse(hello_of(), hello_of(**theirs)) == message


def test_unknown_versions_are_not_silently_equal() -> None:
    assert reason_to_refuse(hello_of(slipway=None), hello_of(slipway=None)) is None
    assert "version is unknown on both nodes" in unverified(hello_of(slipway=None), hello_of(slipway=None))


def test_an_image_tells_its_version_without_distribution_metadata(tmp_path: Any) -> None:
    HostTree(tmp_path).image(**CUDA)
    host = examine_host(Tree(tmp_path), {})
    assert (host.slipway, host.image) == ("0.2.0", "cuda/cu130 sha256:aa")


def test_outside_an_image_the_distribution_tells_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {DISTRIBUTION: "0.3.0"}.__getitem__)
    assert slipway_version({}) == "0.3.0"
    assert image_identity({}) is None


FORM = {
    **hello_of(),
    **{"local_rank": 0, "hostname": "n1", "cpus": 8, "gpus": 0, "fabric": {}, "unfit": [], "request": None},
}


def test_a_hello_of_the_right_form_is_accepted() -> None:
    finding = {"check": "disk", "verdict": "fail", "message": "full", "fix": "free some"}
    check_form({**FORM, "unfit": [finding], "request": "PEM"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rank": "1"}, "rank is '1'"),
        ({"rank": True}, "rank is True"),
        ({"gpus": 1.5}, "gpus is 1.5"),
        ({"hostname": None}, "hostname is None"),
        ({"hostname": ["x" * 10**6]}, "more characters"),
        ({"fabric": []}, "fabric is \\[\\]"),
        ({"clock": "now"}, "clock is 'now'"),
        ({"request": 5}, "request is 5"),
        ({"unfit": ["disk"]}, "unfit holds 'disk'"),
        ({"unfit": [{"check": "disk", "message": "full"}]}, "unfit holds {'check'"),
    ],
)
def test_a_hello_of_the_wrong_form_says_what_is_wrong(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedError, match=problem):
        check_form({**FORM, **change})


@pytest.mark.parametrize("name", ["rank", "local_rank", "hostname", "cpus", "gpus", "fabric", "unfit", "clock"])
def test_a_hello_lacks_nothing(name: str) -> None:
    with pytest.raises(MalformedError, match=f"{name} is missing"):
        check_form({key: value for key, value in FORM.items() if key != name})
