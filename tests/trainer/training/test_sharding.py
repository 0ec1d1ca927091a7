"""Every policy loss through the real engine: the gradient is the same for 1, 2 and 4 ranks and any micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.trainer.training import loss_program
from tests.trainer.training.ranks import run_ranks

PROGRAM = Path(loss_program.__file__)
RANKS = (1, 2, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    directory = tmp_path_factory.mktemp("losses")
    for world_size in RANKS:
        run_ranks(PROGRAM, world_size, directory)
    return {size: torch.load(directory / f"losses_{size}.pt", weights_only=False) for size in RANKS}


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize(("policy_loss", "mode"), loss_program.CASES)
def test_the_gradient_does_not_depend_on_ranks_or_micro_batches(
    results: dict[int, Any], policy_loss: str, mode: str, world_size: int
) -> None:
    gradients, metrics = results[1][policy_loss, mode, loss_program.ROWS]
    # A sum over tokens is larger than a mean by the number of tokens, and so is its rounding error.
    scale = max(1.0, max(float(gradient.abs().max()) for gradient in gradients.values()))
    for size in loss_program.MICRO_BATCHES:
        other, other_metrics = results[world_size][policy_loss, mode, size]
        for name, gradient in gradients.items():
            assert_close(other[name] / scale, gradient / scale, atol=1e-6, rtol=0, msg=lambda t, n=name: f"{n}: {t}")
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("mode", loss_program.MODES)
def test_a_failed_response_changes_no_gradient(results: dict[int, Any], mode: str, world_size: int) -> None:
    gradients, metrics = results[1]["alone", mode, 3]
    other, other_metrics = results[world_size]["failed", mode, 3]
    scale = max(1.0, max(float(gradient.abs().max()) for gradient in gradients.values()))
    for name, gradient in gradients.items():
        assert_close(other[name] / scale, gradient / scale, atol=1e-6, rtol=0, msg=lambda t, n=name: f"{n}: {t}")
    assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_losses_and_aggregations_differ_from_each_other(results: dict[int, Any]) -> None:
    """Guards the test above, which would pass if all gradients were zero."""
    norms = {
        case: sum(float(gradient.square().sum()) for gradient in results[1][*case, loss_program.ROWS][0].values())
        for case in loss_program.CASES
    }
    assert min(norms.values()) > 0
    assert len({round(norm, 12) for norm in norms.values()}) == len(norms)
