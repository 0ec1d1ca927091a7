"""The chat template: the user's own, its arguments, system prompts and tools."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.config.sections.data import DataConfig
from trainer.data.dataset import PromptDataset
from trainer.data.formats.chat_template import use_chat_template
from trainer.data.formats.tools import checked_tools
from trainer.errors import ConfigError, DataError
from trainer.models.small import build_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %} quick{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer(["How many are 1 + 2? #### 3"])


def write(path: Path, **columns: Any) -> Path:
    row = {
        "data_source": "here",
        "prompt": [{"role": "user", "content": "1 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    pq.write_table(pa.Table.from_pylist([{**row, **columns}]), path)
    return path


def text(file: Path, tokenizer: Any, **settings: Any) -> str:
    data = DataConfig.model_validate({"chat_template": TEMPLATE, "max_prompt_length": 200, **settings})
    prompts = PromptDataset([file], use_chat_template(tokenizer, data), data)
    return str(tokenizer.decode(prompts[0].token_ids))


def test_the_users_template_with_its_arguments(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.parquet")
    assert text(file, tokenizer) == "user: 1 + 2?\nassistant:"
    thinks_not = {"chat_template_kwargs": {"enable_thinking": "False"}}
    assert text(file, tokenizer, **thinks_not) == "user: 1 + 2?\nassistant: quick"
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    assert text(file, tokenizer, chat_template=str(tmp_path / "own.jinja")) == "1 + 2?"


def test_a_file_that_is_missing_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template=own\.jinja: neither"):
        use_chat_template(tokenizer, DataConfig(chat_template="own.jinja"))


def test_the_system_prompt_opens_prompts_without_one(tmp_path: Path, tokenizer: Any) -> None:
    settings = {"system_prompt": "Count."}
    assert text(write(tmp_path / "a.parquet"), tokenizer, **settings).startswith("system: Count.\nuser: 1 + 2?")
    file = write(tmp_path / "b.parquet", prompt=[{"role": "system", "content": "Think."}])
    assert text(file, tokenizer, **settings) == "system: Think.\nassistant:"


def test_tools_of_a_row_replace_those_of_the_file(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "search"}]))
    settings = {"tools_file": tmp_path / "tools.json"}
    assert text(write(tmp_path / "a.parquet"), tokenizer, **settings).startswith("[search]user")
    file = write(tmp_path / "b.parquet", tools=[{"name": "add", "description": None}])
    assert text(file, tokenizer, **settings).startswith("[add]user")
    with pytest.raises(DataError, match="the tools are not a list of mappings"):
        checked_tools("row 3", "5")


def test_whatever_changes_tokens_is_part_of_the_cache_key(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "search"}]))
    file, cache = write(tmp_path / "a.parquet"), tmp_path / "cache"
    changes: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"system_prompt": "Count."},
        {"tools_file": tmp_path / "tools.json"},
        {"chat_template": "{{ messages[0].content }}"},
    ]
    texts = {text(file, tokenizer, cache_dir=cache, **change) for change in changes}
    assert len(texts) == len(list(cache.glob("*.arrow"))) == len(changes)
