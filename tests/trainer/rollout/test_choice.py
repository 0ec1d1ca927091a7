"""Which rollout engine a machine uses. What is installed is simulated: the image always has both packages."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import trainer
from trainer.config.sections.rollout import RolloutConfig
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.rollout.engine import check_engine, choose_engine, engine_rows
from trainer.rollout.vllm.settings import expert_settings, graph_settings, weight_settings


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))


def test_the_setting_accepts_every_engine_and_auto_but_nothing_else() -> None:
    for name in ("auto", *engine_rows()):
        assert RolloutConfig.model_validate({"engine": name}).engine == name
    with pytest.raises(ValidationError, match="'auto', 'transformers' or 'vllm'"):
        RolloutConfig.model_validate({"engine": "vlm"})


def test_auto_takes_vllm_where_it_is_installed() -> None:
    assert choose_engine("auto") == ("vllm", "vllm is installed")
    assert choose_engine("transformers") == ("transformers", "rollout.engine=transformers")


def test_auto_takes_transformers_where_vllm_is_missing_here_simulated(without_vllm: None) -> None:
    assert choose_engine("auto") == ("transformers", "vllm is not installed")


def test_an_engine_that_is_not_installed_is_refused_here_simulated(without_vllm: None) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm: vllm is not installed here") as caught:
        choose_engine("vllm")
    assert caught.value.hint == "install it, or set rollout.engine=transformers"


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("tensor_parallel", 2, "has one device"),
        ("quantization", "fp8", "does not quantise"),
        ("speculative_tokens", 4, "drafts no tokens"),
    ],
)
def test_what_only_vllm_does_is_refused_with_transformers(setting: str, value: object, words: str) -> None:
    def check(engine: str) -> None:
        sections = {"rollout": {"engine": engine, setting: value}, "algorithm": {"correction": "tis"}}
        check_engine(Config.model_validate(sections))

    check("vllm")
    with pytest.raises(ConfigError, match=rf"rollout\.{setting}={value}: an engine of transformers {words}") as caught:
        check("transformers")
    assert "rollout.engine=vllm" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "rank", "words"),
    [("cpu", 0, "vLLM quantises on GPUs only"), ("cuda", 8, "the frozen weights under adapters are not quantised")],
)
def test_vllm_quantises_whole_models_on_gpus(device: str, rank: int, words: str) -> None:
    given = {
        "rollout": {"quantization": "fp8", "lora": "adapters"},
        "algorithm": {"correction": "tis"},
        "actor": {"lora": {"rank": rank}},
    }
    with pytest.raises(ConfigError, match=words):
        weight_settings(Config.model_validate(given), device)


def test_merged_adapters_are_quantised_with_the_weights() -> None:
    rollout = {"quantization": "fp8", "lora": "merged"}
    given = {"rollout": rollout, "algorithm": {"correction": "tis"}, "actor": {"lora": {"rank": 8}}}
    assert "quantization" in weight_settings(Config.model_validate(given), "cuda")


def test_engines_that_span_gpus_do_not_share_them() -> None:
    with pytest.raises(ValidationError, match=r"rollout\.tensor_parallel=2 needs rollout\.engines_per_gpu=1"):
        RolloutConfig.model_validate({"tensor_parallel": 2, "engines_per_gpu": 2, "kv_cache_gib": 1})


def test_choosing_an_engine_does_not_import_vllm() -> None:
    root = Path(trainer.__file__).parents[1]  # and not the copy of the trainer in the image
    program = "import sys, trainer.rollout.engine as e; e.engine_rows(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=root)


@pytest.mark.parametrize(
    ("device", "rollout", "most"),
    [
        ("cuda", {"max_num_seqs": 256}, None),  # vLLM has graphs of up to 512 responses by itself
        ("cuda", {"max_num_seqs": 640}, 640),
        ("cuda", {"max_num_seqs": 641}, 656),  # graphs are of multiples of 16
        ("cuda", {"max_num_seqs": 4096}, 1024),
        ("cuda", {"max_num_seqs": 640, "enforce_eager": True}, None),
        ("cuda", {"max_num_seqs": 640, "speculative_tokens": 4}, 640),
        ("cpu", {"max_num_seqs": 640}, None),
    ],
)
def test_steps_of_many_responses_have_cuda_graphs_too(device: str, rollout: dict[str, Any], most: int | None) -> None:
    settings = graph_settings(Config.model_validate({"rollout": rollout}), device)
    assert settings == ({} if most is None else {"max_cudagraph_capture_size": most})


@pytest.mark.parametrize(
    ("model", "device", "rollout", "expected"),
    [
        ({"num_experts": 8}, "cuda", {}, {"moe_backend": "triton"}),
        ({"text_config": {"n_routed_experts": 8}}, "cuda", {}, {"moe_backend": "triton"}),
        ({"num_local_experts": 8}, "cpu", {}, {}),
        ({"num_local_experts": 8}, "cuda", {"quantization": "fp8"}, {}),
        ({"hidden_size": 8}, "cuda", {}, {}),
    ],
)
def test_experts_keep_the_layout_of_the_files(
    tmp_path: Path, model: dict[str, Any], device: str, rollout: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    sections = {"model": {"path": tmp_path}, "rollout": rollout, "algorithm": {"correction": "none"}}
    config = Config.model_validate(sections)
    assert expert_settings(config, device) == expected
