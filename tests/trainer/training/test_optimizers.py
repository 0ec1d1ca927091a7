"""Every optimizer on two ranks: compared with torch's on one, offloaded, and resumed in the middle of a schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.trainer.training import optimizer_program
from tests.trainer.training.ranks import run_ranks

PROGRAM = Path(optimizer_program.__file__)
CASES = list(optimizer_program.CASES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("optimizers")
    run_ranks(PROGRAM, 2, directory)
    return dict(torch.load(directory / "found.pt", weights_only=False))


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_optimizer_takes_the_steps_of_torch_s_on_a_whole_network(results: dict[str, Any], name: str) -> None:
    for weight, expected in results[name]["plain"].items():
        assert_close(results[name]["trained"][weight], expected, atol=1e-7, rtol=0, msg=lambda t, w=weight: f"{w}: {t}")


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_run_continues_bit_for_bit(results: dict[str, Any], name: str) -> None:
    run = results[name]
    assert run["resumed rates"] == run["rates"][2:]
    assert run["resumed metrics"] == run["metrics"][2:]
    assert len(set(run["rates"])) == optimizer_program.UPDATES  # the schedule moves
    for weight, expected in run["trained"].items():
        assert torch.equal(run["resumed"][weight], expected)


@pytest.mark.parametrize("name", CASES)
def test_offloaded_states_change_no_result(results: dict[str, Any], name: str) -> None:
    assert results[name]["idle bytes"] == (0, 0)
    for weight, expected in results[name]["trained"].items():
        assert torch.equal(results[name]["offloaded"][weight], expected)


def test_the_first_update_of_a_warm_up_changes_nothing(results: dict[str, Any]) -> None:
    first, second = results["adamw"]["metrics"][:2]
    assert results["adamw"]["rates"][0] == 0
    assert first == second


def test_a_checkpoint_of_another_optimizer_is_refused(results: dict[str, Any]) -> None:
    assert "it was saved with another optimizer, which keeps exp_avg" in results["of adamw"]


def test_weights_and_states_may_be_bfloat16(results: dict[str, Any]) -> None:
    assert results["bfloat16 types"] == {torch.bfloat16}
    losses = [metrics["loss"] for metrics in results["bfloat16"]]
    assert losses == pytest.approx([metrics["loss"] for metrics in results["adamw"]["metrics"]], rel=0.05)
