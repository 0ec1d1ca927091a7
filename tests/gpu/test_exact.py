"""`actor.backend=exact`: engine and actor compute log-probs by the same operators, to the bit. On Hopper GPUs only."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.whole_runs import COMMON, FAST, Finished, Machine, Record, write_model
from trainer.models.exact.operators import FORMULAS, rope_table

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().cuda()


def near(values: Tensor, expected: Tensor) -> bool:
    """Whether bfloat16's rounding of results and of factors explains the difference."""
    return float((values.float() - expected.float()).norm() / expected.float().norm()) < 2e-2


def test_kernels_compute_the_formulas_and_rows_depend_on_nothing_else() -> None:
    from trainer.models.exact import kernels

    x, weight, bias, scale = tensor(300, 512), tensor(384, 512), tensor(384), tensor(512)
    product, norm = kernels.product(x, weight, bias), kernels.norm(x, scale, 1e-6)
    assert near(product, FORMULAS.product(x, weight, bias))
    assert near(norm, FORMULAS.norm(x, scale, 1e-6))
    positions, table = torch.arange(300).cuda(), rope_table(300, 128, 1e6, torch.device("cuda"), torch.bfloat16)
    query, key = tensor(300, 512), tensor(300, 256)
    turned = kernels.rope(positions, query, key, 128, table)
    assert all(map(torch.equal, turned, FORMULAS.rope(positions, query, key, 128, table)))
    for rows in (slice(0, 1), slice(7, 100), slice(200, 300)):
        assert torch.equal(kernels.product(x[rows], weight, bias), product[rows])
        assert torch.equal(kernels.norm(x[rows], scale, 1e-6), norm[rows])
    ids = torch.arange(300).cuda() % 384
    logits = product / 32  # of the size of 1
    assert (kernels.log_probs(logits.clone(), ids, 0.7) - FORMULAS.log_probs(logits, ids, 0.7)).abs().max() < 0.05


def test_attention_and_its_gradients_are_those_of_the_formula_and_shared_prompts_change_nothing() -> None:
    from trainer.models.exact import kernels

    lengths = torch.tensor([0, 40, 200])  # the second row is its prompt, the first 100 tokens, and 100 of its own
    offsets = lengths.cumsum(0).to(torch.int32).cuda()
    named = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 256, "max_length_k": 256}
    parts = [tensor(240, heads, 128).requires_grad_() for heads in (4, 2, 2)]
    by_output = tensor(240, 4, 128)
    results, expected = (attend(*parts, 128**-0.5, **named) for attend in (kernels.attention, FORMULAS.attention))
    assert near(results, expected)
    gradients = [torch.autograd.grad(result, parts, by_output) for result in (results, expected)]
    assert all(map(near, *gradients))
    query, key, value = (part.detach() for part in parts)
    last = torch.tensor([0, 100], dtype=torch.int32).cuda()
    seen = torch.tensor([0, 200], dtype=torch.int32).cuda()
    visible = torch.arange(40, 240).cuda()
    bounds = {"cu_seq_lens_q": last, "cu_seq_lens_k": seen, "max_length_q": 256, "max_length_k": 256}
    continued = kernels.attention(query[140:], key, value, 128**-0.5, **bounds, visible=visible)
    assert torch.equal(continued, results[140:])


@pytest.mark.parametrize("settings", [(), ("algorithm.advantage=grpo", "rollout.samples_per_prompt=4")])
def test_the_first_pass_of_every_update_has_the_engines_log_probs(
    machine: Machine, record_property: Record, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """The run itself compares the first step's; with one optimizer step the KL to the old log-probs tells the others.
    Responses to one prompt share it in the actor, and each update is large."""
    model = (
        f"model.path={write_model(tmp_path / 'model', width=512)}",
        "actor.backend=exact",
        "actor.mini_batch_size=64",
    )
    batch = (f"data.train_batch_size={16 if settings else 32}", "rollout.temperature=0.8")
    name = "exact-grpo" if settings else "exact-ppo"
    run = Finished.of(machine.runs.start(name, *COMMON, *FAST, *model, *batch, *settings, *machine.on(1)))
    run.note(record_property)
    for row in run.steps:
        assert row["actor/approximate_kl"] == 0.0
        assert row["rollout/repairs"] == 0
        assert row["actor/gradient_norm"] > 0
    assert run.steps[0]["reference/kl"] == 0.0
    assert run.steps[-1]["reference/kl"] != 0.0
