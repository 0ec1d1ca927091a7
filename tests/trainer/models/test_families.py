"""Every model family: load, compute log-probs, train one step, export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.trainer.training.rank_program import ROWS, batch, loss
from trainer.cluster.place import RankPlace
from trainer.config.sections.roles import LoraConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import DataError
from trainer.models.export import write_language_model
from trainer.models.lora import add_adapters
from trainer.models.networks import PolicyNetwork
from trainer.models.pretrained import empty_language_model, load_language_model
from trainer.models.small import build_tokenizer
from trainer.roles.actor import ActorWorker
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
MIXTURE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2 and 2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "Llama 3": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA_3_ROPE, "bos_token_id": None}),
    "GLM 4.5": ("glm4_moe", MIXTURE),
    "Mistral": ("mistral", {"tie_word_embeddings": False, "sliding_window": 6, "bos_token_id": None}),
}


pytestmark = pytest.mark.usefixtures("one_rank")


def small_model(family: str, **more: Any) -> nn.Module:
    """A model with random weights; `more` are fields of its configuration."""
    kind, special = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **special,
        **more,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_model(directory: Path, family: str) -> None:
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    model = small_model(
        family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def transformers_log_probs(directory: Path, rows: Batch, temperature: float) -> Tensor:
    """The same computed by Transformers, row by row."""
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, attn_implementation="eager")
    log_probs_of_rows = torch.zeros(rows.response_mask.shape)
    for row in range(len(rows)):
        prompt, length = int(rows.prompt_lengths[row]), int(rows.lengths[row])
        ids = rows.token_ids[row : row + 1, :length]
        log_probs = (model(ids).logits[0, prompt - 1 : -1] / temperature).log_softmax(dim=-1)
        log_probs_of_rows[row, : length - prompt] = log_probs.gather(-1, ids[0, prompt:, None]).squeeze(-1)
    return log_probs_of_rows


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_loads_matches_transformers_trains_and_exports(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", family)
    rows, limit = batch(), MicroBatchLimit(ROWS)
    network = PolicyNetwork(load_language_model(tmp_path / "model"), temperature=0.7)
    settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.0, max_gradient_norm=1.0)
    engine = TrainingEngine(network, Execution(torch.device("cpu"), torch.float32), settings)
    before = engine.forward(rows, limit)
    assert_close(before, transformers_log_probs(tmp_path / "model", rows, 0.7), atol=1e-5, rtol=0)

    losses = [engine.update(rows, loss, limit)["loss"] for _ in range(2)]
    assert losses[1] < losses[0]

    weights = [*engine.full_weights(network.language_model), *engine.buffers(network.language_model)]
    write_language_model(tmp_path / "model", weights, torch.float32, tmp_path / "export")
    after = engine.forward(rows, limit)
    assert (after - before).abs().max() > 0.01
    assert_close(after, transformers_log_probs(tmp_path / "export", rows, 0.7), atol=1e-5, rtol=0)
    exported = AutoTokenizer.from_pretrained(tmp_path / "export", local_files_only=True)
    assert exported("1 + 2")["input_ids"] == build_tokenizer(["How many are 1 + 2? #### 3"])("1 + 2")["input_ids"]


@pytest.mark.parametrize("rank", [0, 2])
def test_an_export_holds_the_buffers_that_belong_to_the_model(rank: int, tmp_path: Path) -> None:
    """Biases that choose experts are no parameters, and stay in float32 beside weights in 16 bits."""
    bias = torch.tensor([0.1, 0.2, 0.3, 0.4])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    write_model(tmp_path / "model", "GLM 4.5")
    model = load_language_model(tmp_path / "model")
    model.get_buffer(name).copy_(bias)
    lora = LoraConfig(rank=rank, target_modules=["q_proj"])
    if rank:
        add_adapters(model, lora, seed=0)
    config = Config.model_validate(
        {"model": {"path": tmp_path / "model", "dtype": "bfloat16"}, "actor": {"lora": lora.model_dump()}}
    )
    actor = ActorWorker(config, RankPlace(0, 1, "127.0.0.1", "cpu"))
    actor.engine = TrainingEngine(PolicyNetwork(model, 1.0), Execution(torch.device("cpu"), torch.float32))
    actor.export(tmp_path / "export")
    assert torch.equal(load_language_model(tmp_path / "export", torch.bfloat16).state_dict()[name], bias)


@pytest.mark.parametrize(("engine", "joins"), [("vllm", False), ("transformers", True)])
def test_engines_get_the_weights_and_buffers_under_names_that_they_know(
    engine: str, joins: bool, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", "GLM 4.5")
    config = Config.model_validate(
        {"model": {"path": tmp_path / "model", "dtype": "bfloat16"}, "rollout": {"engine": engine}}
    )
    actor = ActorWorker(config, RankPlace(0, 1, "127.0.0.1", "cpu"))
    model = load_language_model(tmp_path / "model")
    in_files = load_file(tmp_path / "model" / "model.safetensors")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()} if joins else in_files
    actor.engine = TrainingEngine(PolicyNetwork(model, 1.0), Execution(torch.device("cpu"), torch.float32))
    sent = dict(actor.trained_weights(shared_once=True)) | dict(actor.fixed_weights())
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("load", [load_language_model, empty_language_model])
def test_a_model_that_brings_its_own_code_is_refused(load: Callable[[Path], nn.Module], tmp_path: Path) -> None:
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit")
    with pytest.raises(DataError, match="Transformers cannot load it"):
        load(tmp_path)
