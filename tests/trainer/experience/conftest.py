"""The tokenizer of the scripted conversations."""

from typing import Any

import pytest

from tests.trainer.experience.conversations.scripted_policy import TEMPLATE, check
from trainer.config.sections.data import DataConfig
from trainer.data.formats.chat_template import use_chat_template
from trainer.models.small import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = ["What is 12 + 7? #### 19 answer reward Current parsed", check("19"), "tool user assistant"]
    return use_chat_template(build_tokenizer(texts), DataConfig(chat_template=TEMPLATE))
