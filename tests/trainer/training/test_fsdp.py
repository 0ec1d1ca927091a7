"""The training engine on one, two and four ranks, compared with a plain model and across numbers of ranks."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.training import rank_program
from tests.trainer.training.ranks import run_ranks
from trainer.training.loss_scale import GROWTH_INTERVAL, LossScale
from trainer.training.ranks.process_group import interface_of

PROGRAM = Path(rank_program.__file__)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results of two ranks, of one that continued from their checkpoint, and of four that continued from that one's."""
    directory = tmp_path_factory.mktemp("fsdp")
    for world_size in (2, 1, 4):
        run_ranks(PROGRAM, world_size, directory)
    return {size: torch.load(directory / f"world_{size}.pt", weights_only=False) for size in (1, 2, 4)}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Log-probs and gradients of the same model and batch, row by row, without FSDP, packing or chunks."""
    network = rank_program.network()
    model = network.language_model
    model.set_attn_implementation("eager")
    log_probs, loss = row_by_row(lambda ids: model(ids).logits)
    loss.backward()
    gradients = {name: weight.grad for name, weight in network.named_parameters()}
    return {"log_probs": log_probs, "loss": loss.item(), "gradients": gradients, "network": network}


def row_by_row(logits_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs of the batch and the program's loss, for a model that maps token ids [1, tokens] to logits."""
    batch = rank_program.batch()
    token_count = int(batch.response_mask.sum())
    log_probs = torch.zeros(batch.response_mask.shape)
    total = torch.zeros(())
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        ids = batch.token_ids[row : row + 1, :length]
        logits = logits_of(ids)[0, prompt - 1 : -1] / 0.7
        distribution = torch.distributions.Categorical(logits=logits)
        chosen = distribution.log_prob(ids[0, prompt:])
        advantages = batch.advantages[row, : length - prompt]
        total = total + (chosen * advantages + chosen.square() / 20 - distribution.entropy()).sum() / token_count
        log_probs[row, : length - prompt] = chosen.detach()
    return log_probs, total


@pytest.fixture(scope="module")
def plain_adapted(plain: dict[str, Any]) -> dict[str, Any]:
    """The same for a model with weights W + alpha / rank B A, with the gradients of A and B."""
    model, parts = plain["network"].language_model, {}
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for name, weight in rank_program.adapted_network().language_model.named_parameters():
        if "lora" in name:
            parts[f"language_model.{name}"] = weight.detach().clone().requires_grad_()
    for name in list(parts):
        if name.endswith("lora_A"):
            adapted = name.removeprefix("language_model.").replace("lora_A", "weight")
            weights[adapted] = weights[adapted] + 6 / 2 * parts[name.replace("lora_A", "lora_B")] @ parts[name]
    log_probs, loss = row_by_row(lambda ids: torch.func.functional_call(model, weights, (ids,)).logits)
    loss.backward()
    gradients = {name: part.grad for name, part in parts.items()}
    return {"log_probs": log_probs, "loss": loss.item(), "gradients": gradients}


SPLITS = ["whole", "in parts", "by tokens", "in chunks", "checkpointed", *rank_program.SHARDINGS]


@pytest.mark.parametrize(
    ("world_size", "split"),
    [
        *itertools.product((1, 2, 4), SPLITS),
        *itertools.product((2,), rank_program.SHARDINGS_OF_TWO),
        *itertools.product((4,), rank_program.SHARDINGS_OF_FOUR),
    ],
)
def test_gradients_do_not_depend_on_ranks_micro_batches_chunks_or_sharding(
    runs: dict[int, dict[str, Any]], plain: dict[str, Any], world_size: int, split: str
) -> None:
    gradients, metrics = runs[world_size][split]
    assert gradients.keys() == plain["gradients"].keys()
    for name, gradient in gradients.items():
        assert_close(gradient, plain["gradients"][name], atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    assert metrics["loss"] == pytest.approx(plain["loss"], abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_offloading_frees_memory_between_calls_and_changes_no_result(
    runs: dict[int, dict[str, Any]], world_size: int
) -> None:
    run = runs[world_size]
    metrics, weights = run["offloaded, trained"]
    expected_metrics, expected = run["resharded, trained"]
    assert metrics == expected_metrics
    for name, weight in expected.items():
        assert_close(weights[name], weight, atol=0, rtol=0)
    assert run["offloaded, idle bytes"] == (0, 0)
    assert min(run["resharded, idle bytes"]) > 0


@pytest.mark.parametrize(
    ("world_size", "sharding"),
    [*itertools.product((2,), rank_program.SHARDINGS_OF_TWO), *itertools.product((4,), rank_program.SHARDINGS_OF_FOUR)],
)
def test_replicated_and_split_weights_train_like_one_network(
    runs: dict[int, dict[str, Any]], world_size: int, sharding: str
) -> None:
    run = runs[world_size]
    metrics, weights = run[f"{sharding}, trained"]
    expected_metrics, expected = run["resharded, trained"]
    for metric, wanted in zip(metrics, expected_metrics, strict=True):
        assert metric == pytest.approx(wanted, abs=1e-5)
    for name, weight in expected.items():
        assert_close(weights[name], weight, atol=1e-3, rtol=0)  # see the test of checkpoints below
    expected = run["resharded, log_probs"]
    assert_close(run[f"{sharding}, log_probs"][: len(expected)], expected, atol=1e-3, rtol=0)


def test_weights_shared_by_all_heads_get_gradients_from_all_heads(runs: dict[int, dict[str, Any]]) -> None:
    whole, _ = runs[2]["norms of heads", 1]
    split, _ = runs[2]["norms of heads", 2]
    assert any("q_norm" in name for name in whole)
    for name, gradient in whole.items():
        assert_close(split[name], gradient, atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def test_a_copy_of_the_weights_is_sharded_over_shard_size_ranks(runs: dict[int, dict[str, Any]]) -> None:
    weight_bytes = [runs[4][f"{name}, idle bytes"][0] for name in ("two copies of the weights", "resharded")]
    assert weight_bytes[0] == 2 * weight_bytes[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_float16_unscales_gradients_and_lowers_the_scale_after_an_overflow(
    runs: dict[int, dict[str, Any]], world_size: int
) -> None:
    first, overflow, later = runs[world_size]["float16"]
    whole, _ = runs[world_size]["resharded, trained"]
    assert first["gradient_norm"] == pytest.approx(whole[0]["gradient_norm"], rel=1e-2)
    assert first["skipped"] == later["skipped"] == 0
    assert (overflow["skipped"], overflow["loss_scale"]) == (1, 2.0**59)
    assert later["loss"] == pytest.approx(whole[1]["loss"], rel=1e-2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_adapters_add_their_product_and_only_they_are_trained(
    runs: dict[int, dict[str, Any]], plain: dict[str, Any], plain_adapted: dict[str, Any], world_size: int
) -> None:
    adapted, rows = runs[world_size]["lora"], slice(rank_program.ROWS // world_size)
    gradients, metrics = adapted["gradients"]
    assert gradients.keys() == plain_adapted["gradients"].keys()
    for name, gradient in gradients.items():
        assert_close(gradient, plain_adapted["gradients"][name], atol=1e-6, rtol=0, msg=lambda t, n=name: f"{n}: {t}")
    assert metrics["loss"] == pytest.approx(plain_adapted["loss"], abs=1e-6)
    assert_close(adapted["log_probs"], plain_adapted["log_probs"][rows], atol=1e-5, rtol=0)
    # After two steps the network without adapters is still the starting network.
    assert_close(adapted["log_probs without"], plain["log_probs"][rows], atol=1e-5, rtol=0)
    # One that keeps the adapters of its start is that of the start, also after it has loaded others.
    assert_close(adapted["log_probs at the start"], plain_adapted["log_probs"][rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_adapters_are_merged_for_export_and_continue_from_a_checkpoint(
    runs: dict[int, dict[str, Any]], plain: dict[str, Any], world_size: int
) -> None:
    adapted, frozen = runs[world_size]["lora"], plain["network"].language_model.state_dict()
    (next_step, restored), (trained, retrained) = adapted["next"], adapted["trained"]
    assert next_step == restored
    assert trained.keys() == frozen.keys()
    adapter = {
        name.removeprefix("base_model.model.").removesuffix(".weight"): part for name, part in adapted["adapter"]
    }
    for name, weight in frozen.items():
        assert torch.equal(trained[name], retrained[name])
        layer = name.removesuffix(".weight")
        product = adapter[f"{layer}.lora_B"] @ adapter[f"{layer}.lora_A"] if f"{layer}.lora_A" in adapter else 0.0
        assert_close(trained[name], weight + 6 / 2 * product, atol=1e-6, rtol=0)
    saved = {name for name in adapted["checkpoint names"] if name.startswith("network.")}
    assert saved == {f"network.language_model.{name}" for name in adapter}


def test_log_probs_match_a_plain_model_row_by_row(runs: dict[int, dict[str, Any]], plain: dict[str, Any]) -> None:
    for name in ("log_probs", "log_probs by tokens"):
        assert_close(runs[1][name], plain["log_probs"], atol=1e-5, rtol=0)
        assert_close(runs[2][name], plain["log_probs"][:4], atol=1e-5, rtol=0)
        assert_close(runs[4][name], plain["log_probs"][:2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_weights_have_the_models_names_and_values(
    runs: dict[int, dict[str, Any]], plain: dict[str, Any], world_size: int
) -> None:
    expected = plain["network"].language_model.state_dict()
    weights = runs[world_size]["weights"]
    assert weights.keys() == expected.keys()
    for name in expected:
        assert_close(weights[name], expected[name], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("world_size", "sharding"),
    [
        *itertools.product((1, 2, 4), [*rank_program.SHARDINGS, "16 bits"]),
        *itertools.product((2,), rank_program.SHARDINGS_OF_TWO),
        *itertools.product((4,), rank_program.SHARDINGS_OF_FOUR),
    ],
)
def test_engines_get_all_weights_in_the_type_of_the_computation(
    runs: dict[int, dict[str, Any]], world_size: int, sharding: str
) -> None:
    sent, weights = runs[world_size][f"{sharding}, sent"]
    dtype = torch.bfloat16 if sharding == "16 bits" else torch.float32
    shared = "lm_head.weight"  # the embedding under its other name
    assert list(sent) == [name for name in weights if name != shared]
    for name, weight in sent.items():
        assert_close(weight, weights[name].to(dtype), atol=0, rtol=0)


def test_a_restored_engine_repeats_its_steps_exactly(runs: dict[int, dict[str, Any]]) -> None:
    two = runs[2]
    assert two["next"] == two["repeated"]
    for name, weight in two["trained"].items():
        assert_close(two["retrained"][name], weight, atol=0, rtol=0)
        assert not torch.equal(weight, two["weights"][name])


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_checkpoint_of_two_ranks_continues_on_one_and_then_on_four(
    runs: dict[int, dict[str, Any]], world_size: int
) -> None:
    for others, two in zip(runs[world_size]["next"], runs[2]["next"], strict=True):
        assert others == pytest.approx(two, abs=1e-5)
    for name, weight in runs[2]["trained"].items():
        # Adam divides by the root of tiny squares, which magnifies rounding: bound it by a share of the learning rate.
        assert_close(runs[world_size]["trained"][name], weight, atol=1e-3, rtol=0)


def test_a_full_disk_at_one_rank_fails_the_save_on_every_rank_with_the_cause(runs: dict[int, dict[str, Any]]) -> None:
    message, hint = runs[2]["full disk"]
    assert "full: cannot be written: rank 1: " in message
    assert "No space left on device" in message
    assert "Traceback" not in message
    assert "free space" in hint


def test_a_checkpoint_of_a_network_of_another_shape_is_refused(runs: dict[int, dict[str, Any]]) -> None:
    fewer, more, narrower = runs[1]["other networks"]
    assert "its network is larger: it has language_model.model.layers.1." in fewer
    assert "Missing key in checkpoint state_dict: network.language_model.model.layers.2." in more
    assert "Size mismatch between saved" in narrower


def test_the_optimizer_keeps_the_run_s_settings_and_not_the_checkpoint_s(runs: dict[int, dict[str, Any]]) -> None:
    assert runs[2]["learning rate"] == 3e-4


def test_a_full_gpu_is_reported_with_the_settings_to_lower_here_simulated_by_a_loss(
    runs: dict[int, dict[str, Any]],
) -> None:
    message, hint = runs[1]["shortage"]
    assert message == "the GPU's memory is full: CUDA out of memory. Tried to allocate 9 GiB"
    assert "micro_batch_tokens" in hint


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_the_loss_scale_grows_after_many_good_steps_and_stops_at_one() -> None:
    loss_scale = LossScale.of(torch.float16)
    start = loss_scale.value
    assert all(loss_scale.accepts(finite=True) for _ in range(GROWTH_INTERVAL))
    assert loss_scale.value == 2 * start
    assert loss_scale.accepts(finite=False)
    assert loss_scale.value == start
    loss_scale.value = 1.0
    assert not loss_scale.accepts(finite=False)
    restored = LossScale.of(torch.float16)
    restored.restore(loss_scale.state())
    assert restored == loss_scale
    assert not LossScale.of(torch.bfloat16).accepts(finite=False)
