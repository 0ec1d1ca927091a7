"""Inputs of the trainer: settings, prompts, preferences, checkpoints, runs, models, rewards, requests of programs."""

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.fuzz.damage import Target, octets, text, tree, value
from tests.fuzz.run_directory import damaged, read_run_directory
from tests.sealing import with_seal
from trainer.compat.settings import load_config
from trainer.config.tree import Config
from trainer.errors import TrainerError
from trainer.experience.programs.wire import BadRequestError, read_request
from trainer.rewards.answer import Answer
from trainer.rewards.scores import as_scored

OVERRIDES = (
    "actor.learning_rate=1e-6",
    "data.train_files=[a.parquet,b.parquet]",
    "+algorithm.rejection={token_k1: [0.5, 2]}",
    "++actor_rollout_ref.actor.optim.lr=1e-6",
    "~trainer.logger",
    "trainer.logger=['console','wandb']",
    "actor_rollout_ref.rollout.n=${data.train_batch_size}",
    "reward.custom_function.kwargs.scale=2",
    "data.chat_template_kwargs={enable_thinking: false}",
    "model.override_config={attn: 1}",
    "custom_reward_function.path=${oc.env:HOME}/x.py",
    "device_mapping={a: [0,1]}",
)
SETTINGS = [
    {"actor": {"learning_rate": 1e-6, "lora": {"rank": 8}}, "data": {"train_files": ["a"]}, "trainer": {"nnodes": 1}},
    {
        "defaults": ["ppo_trainer", "_self_"],
        "actor_rollout_ref": {"actor": {"strategy": "fsdp", "optim": {"lr": 1e-6}}},
    },
    {"device_mapping": {"a": [0]}, "reward": {"sources": {"x*": "math"}}, "rollout": {"stop": ["x"], "tools": {}}},
    {"data": {"max_prompt_length": "${data.max_response_length}"}, "algorithm": {"rejection": {"token_k1": [0.5, 2]}}},
]
PROMPTS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 1, "split": "train"},
    },
    {"prompt": "text", "reward_model": '{"ground_truth": 2}', "extra_info": None, "data_source": None, "tools": []},
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "chosen": "2",
        "rejected": [{"role": "assistant", "content": "3"}],
    },
    {"prompt": [{"role": "user", "content": "1+1?"}], "completion": "2", "label": True},
]
CONFIGS = [
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
    {"text_config": {"model_type": "qwen2", "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}},
]
OURS = (TrainerError,)


def overrides(random: Random) -> list[str]:
    return [text(random, OVERRIDES, 3) for _ in range(random.randint(1, 3))]


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[Any], object]:
    """Writes what was drawn into a file, which it then reads."""

    def run(content: bytes) -> object:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / name
            path.write_bytes(content)
            return read(path)

    return run


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def settings_file(random: Random) -> bytes:
    """Damaged YAML text, or a damaged tree as YAML, some of it recursive."""
    tree_of_settings = tree(random, SETTINGS)
    if isinstance(tree_of_settings, dict) and random.random() < 0.05:
        tree_of_settings["actor"] = tree_of_settings
    written = yaml.safe_dump(tree_of_settings, allow_unicode=True)
    return octets(random, [written]) if random.random() < 0.5 else written.encode("utf-8", "surrogatepass")


def rows(seeds: list[Any]) -> Callable[[Random], bytes]:
    def make(random: Random) -> bytes:
        lines = "\n".join(json.dumps(tree(random, seeds)) for _ in range(random.randint(1, 2)))
        return octets(random, [lines]) if random.random() < 0.2 else lines.encode()

    return make


class Tokenizer:
    """A stand-in: one token per character, and the chat template that joins contents."""

    eos_token_id, pad_token_id, chat_template, is_fast = 0, 0, "x", False
    all_special_tokens: tuple[str, ...] = ()

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def get_chat_template(self, *_arguments: object) -> str:
        return self.chat_template

    def __call__(self, texts: Any, **_options: object) -> dict[str, Any]:
        many = [[ord(character) for character in line] for line in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": many[0] if isinstance(texts, str) else many}

    def apply_chat_template(self, messages: Any, **_options: object) -> str:
        return "".join(message["content"] for message in messages)


def read_prompts(path: Path) -> object:
    from trainer.config.sections.data import DataConfig
    from trainer.data.dataset import open_dataset

    settings = DataConfig(train_files=[path], max_prompt_length=512)
    dataset = open_dataset([path], Tokenizer(), settings)
    return [dataset[number] for number in range(len(dataset))]


def read_preferences(path: Path) -> object:
    from trainer.config.sections.data import DataConfig
    from trainer.data.preferences import read_labelled, read_pairs

    settings = DataConfig(train_files=[path], max_prompt_length=512, max_response_length=512)
    read = read_labelled if b'"label"' in path.read_bytes() else read_pairs
    return read([path], Tokenizer(), settings)


def read_model(path: Path) -> object:
    from trainer.models.files import check_models
    from trainer.models.overrides import with_overrides
    from trainer.planning.model_size import ModelSize

    model = {"path": str(path.parent), "override_config": {"hidden_size": 32}}
    config = Config.model_validate({"model": model, "trainer": {"output_dir": str(path.parent / "runs")}})
    ModelSize.read(path.parent)
    with_overrides(config)
    return check_models(config)


SUM = "0" * 64
STATE = {
    "format": 3,
    "written": 1.5,
    "state": {
        "step": 3,
        "seed": 1,
        "sampler": {"epoch": 0, "position": 4, "size": 8, "seed": 1},
        "config": {"model": {"path": "/m"}},
        "kl_coefficient": 0.1,
        "lowered": [{"setting": "actor.micro_batch_size", "before": 4, "after": 2}],
        "watched": {"reference/kl": [0.1, None]},
    },
    "inputs": {"model.path": {"config.json": SUM}},
    "files": {"state.json": {"size": 100, "sha256": SUM}, "../b": {"size": 1, "sha256": SUM}},
}


def read_state(path: Path) -> object:
    """What a resumed run and an export do with it."""
    from trainer.data.dataset import PromptSampler
    from trainer.runs.checkpoints.checkpoint import checkpoint_model, last_checkpoint, read_checkpoint
    from trainer.runs.checkpoints.manifest import read_manifest
    from trainer.runs.recovery.memory import with_limits

    checkpoint = path.parent / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    path.rename(checkpoint / path.name)
    state = read_manifest(checkpoint).state
    with_limits(Config(), state.lowered)
    PromptSampler(8, 2, shuffle=True, seed=1).load_state_dict(state.sampler)
    checkpoint_model(checkpoint)
    with suppress(TrainerError):
        last_checkpoint(path.parent)
    return read_checkpoint(checkpoint, model=path.parent)


def sealed_or_not(document: Any) -> Callable[[Random], bytes]:
    """A damaged tree, most often with the SHA-256 that fits."""

    def make(random: Random) -> bytes:
        drawn = tree(random, [document])
        return with_seal(drawn).encode() if isinstance(drawn, dict) and random.random() < 0.9 else dumped(drawn)

    return make


CERTIFICATE = {
    "command": "train",
    "run": "a",
    "seed": 1,
    "software": {"image": None, "version": "1", "commit": None, "code": "00", "python": "3.11", "packages": {"a": "1"}},
    "hardware": {"nodes": 1, "engines": 1, "devices": {"actor": ["x"]}},
    "inputs": {"data.train_files.0": {"path": "/nowhere/a", "files": {"a": "00"}}},
    "origin": {"path": "/nowhere", "content": {"actor": "00"}, "manifest": "00"},
    "changes": ["x"],
    "checkpoints": {"2": {"path": "checkpoints/step_000002", "content": {"actor": "00"}, "manifest": "00"}},
    "models": {"2": {"path": "model", "content": {"model": "00"}}},
    "given": {"trainer": {"total_steps": 2}},
    "settings": {"trainer": {"total_steps": 2, "keep_checkpoints": 1}},
}


def read_certified(path: Path) -> object:
    from trainer.runs.reproduction.certificate import Certificate, differences, read_certificate
    from trainer.runs.reproduction.verify import verify

    differences(read_certificate(path.parent), Certificate.model_validate(CERTIFICATE))
    return verify(path.parent)


REQUEST = {
    "model": "policy",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "tool_choice": "auto",
    "max_tokens": 5,
    "stream": False,
    "response_format": {"type": "text"},
}


def score(random: Random) -> Any:
    scored = {"score": value(random), "token_rewards": [[0, value(random)], value(random)], "pred": value(random)}
    return random.choice([value(random), tree(random, [scored, {"score": 1.0, "other": value(random)}])])


def read_score(given: Any) -> object:
    return as_scored(given, Answer("x", "x", "2", {}, (1, 2)))


TARGETS = (
    Target("overrides", overrides, lambda given: load_config([], given), OURS),
    Target("settings files", settings_file, in_file("a.yaml", lambda path: load_config([str(path)], [])), OURS),
    Target("prompts", rows(PROMPTS), in_file("a.jsonl", read_prompts), OURS),
    Target("preferences", rows(PAIRS), in_file("a.jsonl", read_preferences), OURS),
    Target("config.json", lambda random: dumped(tree(random, CONFIGS)), in_file("config.json", read_model), OURS),
    Target("checkpoints", sealed_or_not(STATE), in_file("state.json", read_state), OURS),
    Target("certificates", sealed_or_not(CERTIFICATE), in_file("certificate.json", read_certified), OURS),
    Target("run directories", damaged, read_run_directory, OURS),
    Target("rewards", score, read_score, OURS),
    Target("requests of programs", lambda random: dumped(tree(random, [REQUEST])), read_request, (BadRequestError,)),
)
