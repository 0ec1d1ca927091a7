"""The comparison with Transformers at the start of a run: it passes for right networks and names a wrong family."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.models.test_log_probs_by_family import TEMPERATURE, language_model
from trainer.config.sections.roles import LoraConfig
from trainer.data.batches.batch import Batch
from trainer.errors import DataError
from trainer.models import attention, networks
from trainer.models.lora import add_adapters
from trainer.models.output_head import PLAIN
from trainer.models.packing import PackedRows
from trainer.training import engine as engine_module
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.micro_batches import Layout, pack
from trainer.training.ranks.sharding import Execution
from trainer.training.self_check import (
    check_head,
    check_log_probs,
    check_rows,
    check_values,
    transformers_log_probs,
    transformers_values,
)

TYPES = [torch.float32, torch.bfloat16]


pytestmark = pytest.mark.usefixtures("one_rank")


def check(family: str, dtype: torch.dtype) -> None:
    model, rows = language_model(family), check_rows(50)
    expected = transformers_log_probs(model, rows, TEMPERATURE)
    engine = TrainingEngine(networks.PolicyNetwork(model, TEMPERATURE), Execution(torch.device("cpu"), dtype))
    check_log_probs(engine, rows, expected, family)


def check_critic(family: str, dtype: torch.dtype) -> None:
    model, rows = language_model(family), check_rows(50)
    head = check_head(model.config.get_text_config().hidden_size)
    expected = transformers_values(model, head, rows)
    network = networks.ValueNetwork(model)
    network.head.weight.data.copy_(head)
    check_values(TrainingEngine(network, Execution(torch.device("cpu"), dtype)), rows, expected, family)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", ["cohere", "falcon_h1", "gemma2", "granite", "mamba", "phi", "qwen3_5_text"])
def test_right_log_probs_pass(family: str, dtype: torch.dtype) -> None:
    check(family, dtype)
    check_critic(family, dtype)


@pytest.mark.parametrize("family", ["biogpt", "opt", "xglm"])
def test_layers_that_drop_out_themselves_do_not_when_activations_are_checkpointed(family: str) -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=50, num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=64, **sizes
    )
    model, rows = AutoModelForCausalLM.from_config(config, dtype=torch.float32), check_rows(50)
    expected = transformers_log_probs(model, rows, TEMPERATURE)
    execution = Execution(torch.device("cpu"), torch.float32, checkpoint_activations=True)
    engine = TrainingEngine(networks.PolicyNetwork(model, TEMPERATURE), execution, OptimizerSettings(1e-3, 0.0, 1.0))
    check_log_probs(engine, rows, expected, family)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_network_with_adapters_passes(dtype: torch.dtype) -> None:
    """The frozen weights have the type of the computation, the trained adapters stay in float32."""
    model, rows = language_model("gemma2").to(dtype), check_rows(50)
    add_adapters(model, LoraConfig(rank=4), seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)  # zeros would hide the adapters
    expected = transformers_log_probs(model, rows, TEMPERATURE)
    engine = TrainingEngine(networks.PolicyNetwork(model, TEMPERATURE), Execution(torch.device("cpu"), dtype))
    check_log_probs(engine, rows, expected, "gemma2")


@pytest.mark.parametrize("dtype", TYPES)
def test_a_forgotten_scale_of_the_logits_is_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "output_head", lambda _model: PLAIN)
    with pytest.raises(DataError, match="granite: this trainer's log-probs differ from Transformers' by"):
        check("granite", dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_state_that_leaks_into_the_next_row_is_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_packed(model: torch.nn.Module) -> torch.nn.Module:
        model.config._attn_implementation_internal = attention.NAME
        return model.eval()

    monkeypatch.setattr(networks, "prepared", set_packed)
    with pytest.raises(DataError, match="mamba: this trainer's log-probs differ"):
        check("mamba", dtype)
    with pytest.raises(DataError, match="mamba: the critic's values differ"):
        check_critic("mamba", dtype)


def test_a_row_that_does_not_see_the_prompt_it_shares_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_own_prompt(batch: Batch, device: torch.device, layout: Layout, _ranks: int) -> PackedRows:
        packed = pack(batch, device, layout)
        assert packed.visible is not None
        start, prompt = int(packed.visible_offsets[2]), int(batch.prompt_lengths[2])
        # The last row sees the prompt of the first in place of its own.
        seen = torch.cat([packed.visible[:start], torch.arange(prompt), packed.visible[start + prompt :]])
        return replace(packed, visible=seen)

    monkeypatch.setattr(engine_module, "pack", without_own_prompt)
    with pytest.raises(DataError, match="qwen3: this trainer's log-probs differ"):
        check("qwen3", torch.float32)


def test_log_probs_that_are_no_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "output_head", lambda _model: PLAIN._replace(scale=float("nan")))
    with pytest.raises(DataError, match="qwen3: this trainer's log-probs differ from Transformers' by nan"):
        check("qwen3", torch.float32)
