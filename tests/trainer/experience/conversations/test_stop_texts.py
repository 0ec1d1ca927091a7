"""Turns that a stop text ends, with Transformers' engine. Its samples are scripted."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.trainer.experience.one_engine import OneEngine
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.experience.conversations.sampler import Conversations
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.rollout.backends import transformers as backend
from trainer.rollout.end_tokens import end_token_ids
from trainer.rollout.engine import open_engine
from trainer.weights.buckets import pack, store

WORLD = """
from trainer.experience.environment import Observation

class World:
    def reset(self, prompt, seed): self.turns = 0
    def step(self, turn):
        self.turns += 1
        return Observation([{"role": "user", "content": "no STO"}], done=self.turns == 2, score=1.0)
"""


@pytest.mark.parametrize("segment", [1, 3, 64])
def test_a_stop_text_may_span_segments_but_not_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment: int
) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    tokenizer = build_tokenizer(["no more"])
    model = create_model(tokenizer, ModelShape(), seed=0)
    save_model(model, tokenizer, tmp_path / "model")
    rollout = {"environment": {"path": tmp_path / "world.py", "name": "World"}, "segment_length": segment}
    config = Config.model_validate(
        {
            "model": {"path": tmp_path / "model"},
            "rollout": {"engine": "transformers", "stop": ["STOP"], **rollout},
            "data": {"max_response_length": 60, "max_prompt_length": 60},
        }
    )
    engine = open_engine("transformers", config, "cpu", end_token_ids(tmp_path / "model"))
    engine.replace_weights([store(bucket) for bucket in pack(model.named_parameters(), torch.float32)])
    turns = ["a STOP", "P no STOP"]
    words = iter([token for turn in turns for token in tokenizer(turn)["input_ids"]])
    monkeypatch.setattr(backend, "sample", lambda *_: (torch.tensor([next(words)]), torch.zeros(1)))
    with closing(Conversations(config, OneEngine(engine), tokenizer)) as conversations:  # type: ignore[arg-type]
        (row,) = conversations.begin([Prompt(0, (1, 2), "", "test", "")], [1], temperature=1.0)
        conversations.finish([row])
    said = tokenizer.decode(row.token_ids)
    assert said == f"{turns[0]}<|end|><|user|>no STO<|assistant|>{turns[1]}"
    assert (row.turns, row.truncated) == (2, False)
