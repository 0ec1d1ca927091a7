"""Networks on packed rows compared with Transformers' forward pass, row by row."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.config.sections.roles import LoraConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.errors import ConfigError, DataError
from trainer.models.files import with_local_models
from trainer.models.linear_log_probs import linear_log_probs, linear_squared_probabilities
from trainer.models.lora import (
    adapted_layers,
    adapter_parameters,
    adapter_weights,
    adapters_off,
    add_adapters,
    keep_start,
    load_adapter,
    write_adapter,
)
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.models.packing import PackedRows
from trainer.models.tensor_parallel import check_split

FAMILIES = ["qwen2", "qwen3", "llama", "mistral"]
TEMPERATURE = 0.7


def language_model(family: str, window: int | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    config.sliding_window = window
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, 50, (length,), generator=generator).tolist()

    prompts, responses = [tokens(n) for n in (3, 1, 6, 2)], [tokens(n) for n in (5, 2, 1, 7)]
    return Batch.from_responses(prompts, responses, [[-1.0] * len(response) for response in responses])


def one_by_one(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by Transformers' eager attention."""
    model.set_attn_implementation("eager")
    log_probs, entropy = torch.zeros(batch.response_mask.shape), torch.zeros(batch.response_mask.shape)
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        ids = batch.token_ids[row : row + 1, :length]
        computed = log_probs_and_entropy(model(ids).logits[0, prompt - 1 : -1], ids[0, prompt:], TEMPERATURE)
        log_probs[row, : length - prompt], entropy[row, : length - prompt] = computed
    return log_probs, entropy


def gradients(model: torch.nn.Module, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs.square().sum() + 0.3 * entropy.sum()).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_rows_match_the_log_probs_and_gradients_of_single_rows(family: str, multiple: int, batch: Batch) -> None:
    model = language_model(family)
    expected = one_by_one(model, batch)
    expected_gradients = gradients(model, *expected)
    computed = PolicyNetwork(model, TEMPERATURE)(PackedRows.of(batch, multiple))
    for output, wanted in zip(computed, expected, strict=True):
        assert_close(output, wanted, atol=1e-5, rtol=0)
    for name, gradient in gradients(model, *computed).items():
        assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


def test_a_sliding_window_hides_earlier_tokens(batch: Batch) -> None:
    model = language_model("mistral", window=3)
    expected, _ = one_by_one(model, batch)
    computed, _ = PolicyNetwork(model, TEMPERATURE)(PackedRows.of(batch))
    assert_close(computed, expected, atol=1e-5, rtol=0)
    whole, _ = one_by_one(language_model("mistral"), batch)
    assert (whole - expected).abs().max() > 1e-4


def test_values_do_not_depend_on_other_rows(batch: Batch) -> None:
    network = ValueNetwork(language_model("qwen2"))
    torch.nn.init.normal_(network.head.weight)
    together = network(PackedRows.of(batch, multiple=16))
    for row in range(len(batch)):
        alone = network(PackedRows.of(batch.rows(torch.tensor([row]))))
        assert_close(together[row : row + 1], alone, atol=1e-5, rtol=0)
    assert torch.equal(together != 0, batch.response_mask)


def test_a_critic_reads_the_states_of_the_text_part_of_a_model(batch: Batch) -> None:
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    images = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3", text_config=text | heads, vision_config=images | {"image_size": 28, "patch_size": 14}
    )
    network = ValueNetwork(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert network.head.weight.shape == (1, 16)
    torch.nn.init.normal_(network.head.weight)
    assert torch.equal(network(PackedRows.of(batch)) != 0, batch.response_mask)


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("frozen_weight", [False, True])
def test_chunks_change_neither_log_probs_nor_gradients(tokens_per_chunk: int, frozen_weight: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(10, 16, generator=generator), torch.randn(30, 16, generator=generator)
    token_ids = torch.randint(0, 30, (10,), generator=generator)
    factors = torch.randn(2, 10, generator=generator)

    def run(chunked: bool) -> tuple[Tensor, ...]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen_weight)
        if chunked:
            outputs = linear_log_probs(h, w, token_ids, TEMPERATURE, tokens_per_chunk)
        else:
            outputs = log_probs_and_entropy(h @ w.T, token_ids, TEMPERATURE)
        (torch.stack(outputs) * factors).sum().backward()
        return (*outputs, h.grad, *([] if frozen_weight else [w.grad]))

    for chunked_result, expected in zip(run(chunked=True), run(chunked=False), strict=True):
        assert_close(chunked_result, expected, atol=1e-5, rtol=1e-5)


def test_skipping_the_entropy_changes_neither_log_probs_nor_gradients() -> None:
    hidden, weight = torch.randn(6, 8), torch.randn(20, 8)
    token_ids = torch.randint(0, 20, (6,))

    def run(with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, entropy = linear_log_probs(h, w, token_ids, TEMPERATURE, 4, with_entropy)
        log_probs.square().sum().backward()
        assert with_entropy == bool(entropy.any())
        return log_probs.detach(), h.grad, w.grad

    for without, wanted in zip(run(False), run(True), strict=True):
        assert_close(without, wanted, atol=0, rtol=0)


def test_memory_of_log_probs_does_not_grow_with_tokens_times_vocabulary() -> None:
    """No tensor saved for the backward pass has a row per token and a column per vocabulary entry."""
    kept: list[torch.Size] = []
    hidden, weight = torch.randn(40, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear_log_probs(hidden, weight, torch.zeros(40, dtype=torch.int64), 1.0, tokens_per_chunk=4)
    assert kept
    assert max(shape.numel() for shape in kept) == weight.numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_cannot_be_split_are_refused(family: str) -> None:
    model = language_model(family)
    layers = model.get_decoder().layers
    check_split(layers, model.config, ranks=2)
    with pytest.raises(ConfigError, match="does not divide the model's num_attention_heads=4"):
        check_split(layers, model.config, ranks=3)
    with pytest.raises(ConfigError, match="does not divide the model's num_key_value_heads=2"):
        check_split(layers, model.config, ranks=4)
    layers[0].mlp.gate_proj = torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"its matrices differ from .* in mlp\.gate_proj"):
        check_split(layers, model.config, ranks=2)


def test_an_adapter_for_an_unknown_layer_is_refused_and_known_layers_are_listed() -> None:
    with pytest.raises(ConfigError, match="no linear layer query") as caught:
        add_adapters(language_model("qwen2"), LoraConfig(rank=2, target_modules=["query", "v_proj"]), seed=0)
    assert "q_proj" in caught.value.hint


def adapted(settings: LoraConfig, seed: int) -> torch.nn.Module:
    model = language_model("qwen2")
    add_adapters(model, settings, seed)
    for _, parameter in adapter_parameters(model):
        torch.nn.init.normal_(parameter)
    return model


def test_a_saved_adapter_is_the_start_of_another_run(tmp_path: Path) -> None:
    saved = LoraConfig(rank=2, alpha=6, target_modules=["q_proj", "v_proj"])
    trained = adapted(saved, 0)
    write_adapter(adapter_weights(trained, lambda tensor: tensor), saved, tmp_path, tmp_path / "adapter")
    again = saved.model_copy(update={"path": tmp_path / "adapter"})
    fresh = adapted(saved, 1)
    load_adapter(fresh, again)
    for (name, loaded), (_, wanted) in zip(adapter_parameters(fresh), adapter_parameters(trained), strict=True):
        assert torch.equal(loaded, wanted), name

    with pytest.raises(ConfigError, match="its rank is 2 and its alpha 6") as caught:
        load_adapter(fresh, again.model_copy(update={"rank": 4}))
    assert "set lora.rank=2" in caught.value.hint
    with pytest.raises(ConfigError, match="adapters for other layers"):
        load_adapter(adapted(LoraConfig(rank=2, target_modules=["o_proj"]), 0), again)
    with pytest.raises(DataError, match="cannot be read"):
        load_adapter(fresh, again.model_copy(update={"path": tmp_path}))


def test_an_adapter_without_a_rank_in_the_settings_keeps_its_own(tmp_path: Path) -> None:
    saved = LoraConfig(rank=2, alpha=6, target_modules=["q_proj", "v_proj"])
    write_adapter(adapter_weights(adapted(saved, 0), lambda tensor: tensor), saved, tmp_path, tmp_path / "adapter")
    given = Config.model_validate({"actor": {"lora": {"path": tmp_path / "adapter"}}})
    assert with_local_models(given).actor.lora == saved.model_copy(update={"path": tmp_path / "adapter"})
    missing = Config.model_validate({"critic": {"lora": {"path": tmp_path}}})
    with pytest.raises(DataError, match="cannot be read"):
        with_local_models(missing)


@pytest.mark.parametrize(
    "excluded", [["down_proj"], ["o_proj", r"model\.layers\.0\..*"], [r".*\.mlp\..*", r".*q_proj"]]
)
def test_an_adapter_without_some_layers_is_the_start_of_another_run(excluded: list[str], tmp_path: Path) -> None:
    saved = LoraConfig(rank=2, exclude_modules=excluded)
    trained = adapted(saved, 0)
    write_adapter(adapter_weights(trained, lambda tensor: tensor), saved, tmp_path, tmp_path / "adapter")
    given = Config.model_validate({"actor": {"lora": {"path": tmp_path / "adapter"}}})
    again = with_local_models(given).actor.lora
    fresh = adapted(again, 1)
    load_adapter(fresh, again)
    assert [name for name, _ in adapted_layers(fresh)] == [name for name, _ in adapted_layers(trained)]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["lm_head", "layers.0.mlp.down_proj"], ["lm_head", r".*\.layers\.0\.mlp\.down_proj"]),
        (r".*\.layers\.[01]\..*", [r".*\.layers\.[01]\..*"]),
        (None, []),
    ],
)
def test_layers_that_peft_excluded_are_excluded(written: object, read: list[str], tmp_path: Path) -> None:
    """peft's list holds names and ends of paths; its text is a regular expression. A name may fit no layer."""
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["down_proj"], "exclude_modules": written}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    lora = with_local_models(Config.model_validate({"actor": {"lora": {"path": tmp_path}}})).actor.lora
    assert lora.exclude_modules == read
    assert any(adapted_layers(adapted(lora, 0))) == (written is None or "lm_head" in written)


def test_with_its_adapters_off_a_network_computes_with_those_that_it_started_from(batch: Batch) -> None:
    model = adapted(LoraConfig(rank=2), 0)
    saved = set(model.state_dict())
    keep_start(model)
    network, rows = PolicyNetwork(model, TEMPERATURE), PackedRows.of(batch)
    with torch.no_grad():
        start = network(rows)[0]
        for _, parameter in adapter_parameters(model):
            parameter.mul_(2)
        assert not torch.allclose(network(rows)[0], start)
        with adapters_off(network):
            assert torch.equal(network(rows)[0], start)
    assert set(model.state_dict()) == saved


def test_squared_probabilities_are_those_of_the_tempered_distribution() -> None:
    hidden, weight = torch.randn(5, 8), torch.randn(50, 8)
    expected = (hidden @ weight.T / TEMPERATURE).softmax(dim=-1).square().sum(dim=-1)
    assert_close(linear_squared_probabilities(hidden, weight, TEMPERATURE, tokens_per_chunk=2), expected)


def test_a_network_returns_squared_probabilities_on_request_only(batch: Batch) -> None:
    network = PolicyNetwork(language_model("qwen2"), TEMPERATURE)
    rows = PackedRows.of(batch)
    with torch.no_grad():
        plain = network(rows)[0]
        with network.returning_squares():
            squares = network(rows)[0]
        assert torch.equal(network(rows)[0], plain)
    chosen = plain != 0
    assert ((squares[chosen] > 0) & (squares[chosen] <= 1)).all()
    assert (squares[chosen] >= (2 * plain[chosen]).exp()).all()  # the sum contains the sampled token's own square


def test_excluded_layers_get_no_adapter() -> None:
    model = adapted(LoraConfig(rank=2, exclude_modules=["down_proj", "o_proj"]), 0)
    names = {name.rpartition(".")[2] for name, _ in adapted_layers(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    with pytest.raises(ConfigError, match="exclude_modules: the model has no linear layer down"):
        adapted(LoraConfig(rank=2, exclude_modules=["down"]), 0)


def test_a_regular_expression_excludes_layers_by_their_whole_path() -> None:
    """peft matches the path of a layer from the model's root."""
    model = adapted(LoraConfig(rank=2, exclude_modules=[r"model\.layers\.0\..*", r".*\.mlp\..*"]), 0)
    names = [name for name, _ in adapted_layers(model)]
    assert names
    assert all(".layers.0." not in name and ".mlp." not in name for name in names)
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match="no linear layer layers"):
        adapted(LoraConfig(rank=2, exclude_modules=[r"layers\.0\..*"]), 0)
    with pytest.raises(ConfigError, match="is no regular expression"):
        adapted(LoraConfig(rank=2, exclude_modules=["(q_proj"]), 0)
