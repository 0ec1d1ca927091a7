"""Programs of tests, started as real processes."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.experience.programs.scripted_program import CLIENT, TEMPLATE, FakeEngines
from trainer.config.sections.data import DataConfig
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.data.formats.chat_template import use_chat_template
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.trajectory import Trajectory
from trainer.models.small import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = ["What is 12 + 7? #### 19 sure? yes no <tool_call> tool user system assistant"]
    return use_chat_template(build_tokenizer(texts), DataConfig(chat_template=TEMPLATE))


@pytest.fixture
def play(tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a program for each question, lets it talk to the policy until it ends, and returns the trajectories."""
    opened: list[Conversations] = []

    def start(
        program: str,
        lines: dict[str, str] | None = None,
        questions: Sequence[str] = ("What?",),
        limit: int = 400,
        processes: int = 8,
        arguments: Sequence[str] = (),
        **rollout: Any,
    ) -> tuple[list[Trajectory], FakeEngines]:
        (tmp_path / "agent.py").write_text(CLIENT + program)
        command = [sys.executable, str(tmp_path / "agent.py"), *arguments]
        settings = {"agent": "program", "segment_length": 4, **rollout}
        settings["program"] = {"command": command, "processes": processes}
        config = Config.model_validate(
            {"rollout": settings, "data": {"max_response_length": limit, "max_prompt_length": 60}}
        )
        engines = FakeEngines(tokenizer, lines or {"What?": "#### 19", "sure?": "yes"})
        conversations = Conversations(config, engines, tokenizer)  # type: ignore[arg-type]
        opened.append(conversations)
        prompts = [Prompt(n, (1, 2, n), "19", "test", question) for n, question in enumerate(questions)]
        rows = conversations.begin(prompts, [100] * len(prompts), temperature=1.0)
        conversations.finish(rows)
        return rows, engines

    yield start
    for conversations in opened:
        conversations.close()
