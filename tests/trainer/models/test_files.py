"""Unsuitable models and tokenizers are refused before anything starts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import trainer
from trainer.config.sections.model import ModelConfig
from trainer.config.sft import SftConfig
from trainer.config.tree import Config
from trainer.errors import ConfigError, DataError
from trainer.models.files import check_models, check_tokenizer, decode, load_tokenizer, read_adapter_config, read_json
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.models.weight_files import check_weights, parameter_count

ROOT = Path(trainer.__file__).parents[1]  # the tested code, not the copy of the trainer in the image


def changed(model: Path, path: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model with one of its files changed."""
    shutil.copytree(model, path)
    content = json.loads((path / file).read_text())
    change(content)
    (path / file).write_text(json.dumps(content))
    return path


def roles(actor: Path, critic: Path | None, **algorithm: str) -> Config:
    return Config.model_validate({"model": {"path": actor}, "critic": {"path": critic}, "algorithm": algorithm})


def test_a_critic_with_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["Quite another text, with other words in it."] * 3, vocabulary_size=300)
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, tmp_path / "critic")
    with pytest.raises(DataError) as caught:
        check_models(roles(model, tmp_path / "critic"))
    assert f"critic.path={tmp_path / 'critic'} has another vocabulary" in str(caught.value)
    assert f"model.path={model}" in str(caught.value)
    assert "omit critic.path" in caught.value.hint
    check_models(roles(model, tmp_path / "critic", advantage="grpo"))  # grpo has no critic


def test_the_same_vocabulary_in_a_larger_embedding_is_accepted(model: Path, tmp_path: Path) -> None:
    """Models of one family pad their embeddings to different sizes."""
    larger = changed(model, tmp_path / "critic", "config.json", lambda c: c.update(vocab_size=c["vocab_size"] + 64))
    check_models(roles(model, larger))
    smaller = changed(model, tmp_path / "small", "config.json", lambda c: c.update(vocab_size=100))
    with pytest.raises(DataError, match="another vocabulary"):
        check_models(roles(model, smaller))


def test_a_missing_or_damaged_model_is_reported(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model: config\.json is missing"):
        check_models(roles(tmp_path, None))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        check_models(roles(tmp_path, None))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_model_of_pipes_and_devices_is_refused(model: Path, tmp_path: Path, name: str, kind: str) -> None:
    """Reading them might never end."""
    path = changed(model, tmp_path / "model", "config.json", lambda _: None)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name) if kind == "pipe" else (path / name).symlink_to("/dev/zero")
    checks: list[Callable[[], object]] = [lambda: check_weights(roles(path, None))]
    match name:
        case "config.json":
            checks.append(lambda: check_models(roles(path, None)))
        case "model.safetensors":
            checks.append(lambda: parameter_count(path))
        case "adapter_config.json":
            checks.append(lambda: read_adapter_config(path))
    for check in checks:
        with pytest.raises(DataError, match=r"not a regular file|is missing"):
            check()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_description_that_is_too_large_is_refused(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="larger than 64 MiB"):
        read_json(tmp_path / name)


def test_a_tokenizer_without_an_end_token_is_refused(model: Path, tmp_path: Path) -> None:
    path = changed(model, tmp_path / "endless", "tokenizer_config.json", lambda c: c.update(eos_token=None))
    (path / "generation_config.json").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = None
    with pytest.raises(DataError) as caught:
        check_tokenizer(tokenizer, path)
    assert f"{path}: the tokenizer has no end token" in str(caught.value)
    assert "eos_token" in caught.value.hint
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    check_tokenizer(tokenizer, path)


def test_a_tokenizer_without_a_pad_token_is_refused_unless_one_is_set(model: Path, tmp_path: Path) -> None:
    path = changed(model, tmp_path / "unpadded", "tokenizer_config.json", lambda c: c.update(pad_token=None))
    with pytest.raises(DataError) as caught:
        load_tokenizer(ModelConfig(path=path))
    assert f"{path}: the tokenizer has no pad token" in str(caught.value)
    assert "set model.pad_token='<|pad|>'" in caught.value.hint
    assert load_tokenizer(ModelConfig(path=path, pad_token="<|pad|>")).pad_token_id == 0
    with pytest.raises(DataError, match="has no such token"):
        load_tokenizer(ModelConfig(path=path, pad_token="<pad>"))


def test_a_model_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    with pytest.raises(DataError) as caught:
        load_tokenizer(ModelConfig(path=tmp_path / "mute"))
    assert f"{tmp_path / 'mute'}: no tokenizer: none of tokenizer.json" in str(caught.value)
    assert "the model's source" in caught.value.hint


def test_prompts_and_responses_longer_than_the_model_s_positions_are_refused(model: Path) -> None:
    data = {"max_prompt_length": 500, "max_response_length": 100}
    with pytest.raises(DataError) as caught:
        check_models(Config.model_validate({"model": {"path": model}, "data": data}))
    assert "add up to 600 tokens" in str(caught.value)
    assert "has 512 positions" in str(caught.value)


def test_the_limit_of_fine_tuning_is_named_as_it_was_given(model: Path) -> None:
    settings = SftConfig.model_validate({"model": {"path": model}, "sft": {"max_length": 600}})
    with pytest.raises(DataError, match=r"sft\.max_length=600, but .* has 512 positions"):
        check_models(settings.for_workers(), settings.row_limit)


def test_positions_of_critic_and_teacher_count_too(model: Path, tmp_path: Path) -> None:
    short = changed(model, tmp_path / "short", "config.json", lambda c: c.update(max_position_embeddings=300))
    data = {"max_prompt_length": 200, "max_response_length": 200}
    for settings in (
        {"critic": {"path": short}},
        {"distillation": {"teacher": short}, "algorithm": {"advantage": "grpo"}, "rollout": {"samples_per_prompt": 2}},
    ):
        with pytest.raises(DataError, match=r"400 tokens, but .*short has 300 positions"):
            check_models(Config.model_validate({"model": {"path": model}, "data": data, **settings}))


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0], "rope_theta": 1e4}


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 300}},
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 300},
        {"rope_scaling": {"type": "su"}, "rope_parameters": None, "original_max_position_embeddings": 300},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 300},
        {
            "rope_parameters": {
                "full_attention": LONGROPE | {"original_max_position_embeddings": 300},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_rows_beyond_which_the_rotation_depends_on_other_rows_are_refused(
    model: Path, tmp_path: Path, entries: dict[str, Any]
) -> None:
    other = changed(model, tmp_path / "other", "config.json", lambda c: c.update(entries))

    def rows_of(longest: int) -> Config:
        data = {"max_prompt_length": 100, "max_response_length": longest - 100}
        return Config.model_validate({"model": {"path": other}, "data": data})

    check_models(rows_of(300))
    with pytest.raises(DataError, match=r"add up to 301 tokens, but beyond 300 .* depends on the longest row"):
        check_models(rows_of(301))


def test_rotations_that_are_scaled_once_have_more_positions(model: Path, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    for name, rotation in {"one": yarn, "nested": {"full_attention": yarn}}.items():
        scaled = changed(model, tmp_path / name, "config.json", lambda c, r=rotation: c.update(rope_parameters=r))
        data = {"max_prompt_length": 500, "max_response_length": 100}
        check_models(Config.model_validate({"model": {"path": scaled}, "data": data}))


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "devices", "fitting"),
    [(4, 2, 2, None), (4, 2, 4, None), (14, 2, 4, "1, 2, 14"), (12, 6, 4, "1, 2, 3, 6, 12"), (4, None, 8, "1, 2, 4")],
)
def test_attention_heads_are_divided_among_the_devices_of_an_engine(
    model: Path, tmp_path: Path, heads: int, key_value_heads: int | None, devices: int, fitting: str | None
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    other = changed(model, tmp_path / "other", "config.json", lambda c: c.update(sizes))
    config = Config.model_validate({"model": {"path": other}, "rollout": {"tensor_parallel": devices}})
    if fitting is None:
        check_models(config)
        return
    with pytest.raises(ConfigError, match=rf"rollout\.tensor_parallel={devices} does not divide the {heads}") as caught:
        check_models(config)
    assert caught.value.hint == f"set it to one of {fitting}"


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_ranks_that_cannot_share_the_heads_of_a_model_are_refused(role: str, model: Path, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    other = changed(model, tmp_path / "other", "config.json", lambda c: c.update(sizes))
    config = {"model": {"path": other}, "algorithm": {"advantage": "gae"}, role: {"sharding": {"context_parallel": 4}}}
    with pytest.raises(DataError, match=rf"{role}\.sharding\.context_parallel=4") as caught:
        check_models(Config.model_validate(config))
    assert caught.value.hint == "set it to one of 1, 2, 3, 6"


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_dense_model_for_ranks_that_divide_experts_is_refused(role: str, model: Path) -> None:
    config = {"model": {"path": model}, "algorithm": {"advantage": "gae"}, role: {"sharding": {"expert_parallel": 2}}}
    with pytest.raises(DataError, match=rf"^{role}\.sharding\.expert_parallel=2: \w+ models have no experts"):
        check_models(Config.model_validate(config))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    path = changed(model, tmp_path / "small", "config.json", lambda c: c.update(vocab_size=100))
    with pytest.raises(DataError, match=r"the tokenizer has \d+ tokens, the model embeds 100"):
        check_tokenizer(tokenizer, path)


def test_a_model_of_the_hub_is_taken_from_the_cache(model: Path, tmp_path: Path) -> None:
    """Runs in a separate process, because the hub's library reads its variables when it is imported."""
    snapshot = tmp_path / "hub" / "models--family--size" / "snapshots" / ("0" * 40)
    shutil.copytree(model, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    code = (
        "import sys; from trainer.config.tree import Config; from trainer.models.files import with_local_models;"
        "print(with_local_models(Config.model_validate({'model': {'path': sys.argv[1]}})).model.path)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def resolved(name: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", code, name]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)

    assert resolved("family/size").stdout.strip() == str(snapshot)
    missing = resolved("family/other").stderr
    assert "model.path=family/other: no such directory, and the Hugging Face hub did not provide it" in missing
    assert resolved(str(model)).stdout.strip() == str(model)


@pytest.mark.parametrize("rows", [0, 1, 64, 200])
@pytest.mark.parametrize("cleans_up", [False, True])
def test_rows_decoded_in_parallel_equal_rows_decoded_one_by_one(rows: int, cleans_up: bool) -> None:
    tokenizer = build_tokenizer(["What is 1 + 2 ? #### 3 , isn 't it ."])
    tokenizer.clean_up_tokenization_spaces = cleans_up
    generator = torch.Generator().manual_seed(rows)
    responses = [torch.randint(0, len(tokenizer), (row % 7,), generator=generator).tolist() for row in range(rows)]
    assert decode(tokenizer, responses) == [tokenizer.decode(row, skip_special_tokens=True) for row in responses]
