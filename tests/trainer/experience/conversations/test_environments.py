"""Conversations with an environment: the author of each token, and the loss mask. A script replaces
the policy where only its words matter; a real network is used where log-probs matter."""

import re
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.experience.conversations.scripted_policy import pieces
from trainer.algorithms.losses.kl import kl_estimate
from trainer.algorithms.returns import generalized_advantages
from trainer.algorithms.token_rewards import token_rewards
from trainer.config.custom_code import CustomCode
from trainer.config.sections.data import DataConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.dataset import Prompt
from trainer.errors import ConfigError, DataError, RewardError
from trainer.experience.conversations.calls import Failure, call_each
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.environment import MessageTokens, environment_class
from trainer.experience.trajectory import Trajectory
from trainer.models.networks import PolicyNetwork
from trainer.models.packing import PackedRows
from trainer.models.small import ModelShape, build_tokenizer, create_model
from trainer.rollout.sampling import Response, SamplingRequest

CALCULATOR = Path(__file__).parents[4] / "examples" / "calculator" / "environment.py"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["What is 12 + 7? calc: 12+7 #### 19 Write EXPRESSION to calculate, or ANSWER to answer."])


class FakeEngines:
    """Says its next line at each turn, within the token limit."""

    def __init__(self, tokenizer: Any, lines: Sequence[str]) -> None:
        self.version = 0
        self.in_flight = False
        self.asked: list[SamplingRequest] = []
        self._tokenizer = tokenizer
        self._words = [tokenizer(line + "<|end|>")["input_ids"] for line in lines]

    def generate(self, requests: Sequence[SamplingRequest], homes: Sequence[int] | None) -> list[Response]:
        del homes
        self.asked += requests
        return [self._response(request.max_tokens or 0) for request in requests]

    def _response(self, most: int) -> Response:
        words = self._words[0][:most]
        self._words[0] = self._words[0][most:]
        ended = not self._words[0]
        if ended:
            self._words.pop(0)
        return Response(tuple(words), tuple(-0.5 for _ in words), ended)


def converse(
    tokenizer: Any,
    lines: Sequence[str],
    path: Path = CALCULATOR,
    name: str = "Calculator",
    limit: int = 64,
    most: int | None = None,
    **rollout: Any,
) -> tuple[Trajectory, FakeEngines]:
    """One conversation in which the policy says these lines."""
    settings = {"environment": {"path": path, "name": name}, **rollout}
    config = Config.model_validate({"rollout": settings, "data": {"max_response_length": limit}})
    engines = FakeEngines(tokenizer, lines)
    prompt = Prompt(0, tuple(tokenizer("<|user|>What is 12 + 7?<|assistant|>")["input_ids"]), "19", "test", "")
    with closing(Conversations(config, engines, tokenizer)) as conversations:  # type: ignore[arg-type]
        (row,) = conversations.begin([prompt], [100], temperature=1.0)
        while not row.done:
            conversations.advance([row], most)
            engines.version += 1
    return row, engines


def test_each_token_is_marked_as_the_policys_or_the_environments(tokenizer: Any) -> None:
    row, engines = converse(tokenizer, ["calc: 12+7", "#### 19"])
    assert pieces(tokenizer, row) == [
        ("calc: 12+7<|end|>", True),
        ("<|user|>19<|assistant|>", False),
        ("#### 19<|end|>", True),
    ]
    assert row.log_probs == [-0.5 if sampled else 0.0 for sampled in row.mask]
    assert (row.turns, row.scored) == (2, None)
    # The second turn continues where the environment stopped, with its own random numbers.
    first, second = engines.asked
    before = row.token_ids[: row.mask.index(False) + row.mask.count(False)]
    assert second.prompt == (*first.prompt, *before)
    assert (first.seed, second.seed) == (100, 100 + len(before))


class CountedTokenizer:
    """A tokenizer that counts how often it is asked for its size."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.sizes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._tokenizer(*arguments, **named)

    def __len__(self) -> int:
        self.sizes += 1
        return len(self._tokenizer)


def test_the_tokenizer_is_asked_for_its_size_once_and_not_in_each_turn(tokenizer: Any) -> None:
    """Some versions take long to count their tokens, while all other threads wait."""
    counted = CountedTokenizer(tokenizer)
    row, _ = converse(counted, ["calc: 12+7", "calc: 1+1", "#### 19"])
    assert (row.turns, counted.sizes) == (3, 1)


def test_a_stop_text_may_be_the_end_token_itself(tokenizer: Any) -> None:
    row, _ = converse(tokenizer, ["calc: 12+7", "#### 19"], stop=["<|end|>"])
    assert pieces(tokenizer, row)[1] == ("<|user|>19<|assistant|>", False)
    row, _ = converse(tokenizer, ["calc: 12+7", "#### 19"], stop=["<|end|>", "12+7"])
    assert pieces(tokenizer, row)[1] == ("<|user|>19<|assistant|>", False)


def test_a_turn_in_segments_is_one_turn_and_each_token_records_its_weights(tokenizer: Any) -> None:
    whole, _ = converse(tokenizer, ["calc: 12+7", "#### 19"])
    in_parts, _ = converse(tokenizer, ["calc: 12+7", "#### 19"], most=3)
    assert (in_parts.token_ids, in_parts.mask, in_parts.turns) == (whole.token_ids, whole.mask, 2)
    sampled = [version for version, sampled in zip(in_parts.versions, in_parts.mask, strict=True) if sampled]
    first_turn = whole.mask.index(False)
    assert sampled[:first_turn] == [place // 3 for place in range(first_turn)]
    assert set(whole.versions[:first_turn]) == {0}


def test_conversations_end_at_the_turn_limit_or_the_token_limit(tokenizer: Any) -> None:
    row, _ = converse(tokenizer, ["calc: 1+1"] * 9, max_turns=2, limit=200)
    assert (row.turns, row.mask[-1]) == (2, True)
    # The environment's words would fill the remaining room, so the policy's last word stays the last.
    first_turn = len(tokenizer("calc: 12+7<|end|>")["input_ids"])
    row, _ = converse(tokenizer, ["calc: 12+7", "#### 19"], limit=first_turn + 3)
    assert all(row.mask)
    assert len(row.token_ids) == first_turn
    # The environment does not answer a truncated turn.
    row, _ = converse(tokenizer, ["calc: 12+7", "#### 19"], limit=first_turn - 1)
    assert (len(row.token_ids), row.turns) == (first_turn - 1, 1)


def test_the_calculator_calculates_and_explains_errors(tokenizer: Any) -> None:
    row, _ = converse(tokenizer, ["calc: (2+3)*-4/8", "calc: 2**9", "hm", "#### 1"], limit=400)
    answers = [text for text, sampled in pieces(tokenizer, row) if not sampled]
    assert "-2.5" in answers[0]
    assert "error: only numbers" in answers[1]
    assert "Write calc: EXPRESSION" in answers[2]


WORLDS = """
import time
from trainer.experience.environment import Observation

class Scoring:
    def reset(self, prompt, seed): self.left = 2
    def step(self, turn):
        self.left -= 1
        return Observation(token_ids=[5, 6], done=self.left == 0, score=0.25 * (2 - self.left))

class Raising(Scoring):
    def step(self, turn): raise KeyError("lost")

class Hanging(Scoring):
    def step(self, turn): time.sleep(60)

class Refusing(Scoring):
    def reset(self, prompt, seed): raise RuntimeError("not today")

class Nonsense(Scoring):
    def step(self, turn): return Observation(done=True, score=float("nan"))

class Wordless(Scoring):
    def step(self, turn): return "19"

def saying(**answer):
    class Saying(Scoring):
        def step(self, turn): return Observation(**answer)
    return Saying

Number = saying(messages=[{"role": "user", "content": 19}])
Null = saying(messages=[{"role": "user", "content": None}])
Surrogate = saying(messages=[{"role": "user", "content": "19 \\ud83d"}])
Text = saying(messages="19")
Missing = saying(messages=None)
TokenText = saying(token_ids="19")
Fraction = saying(token_ids=[1.5])
Huge = saying(token_ids=[10**9])
Negative = saying(token_ids=[-1])
Last = saying(done=True, score=0.75)
Refused = saying(messages=[{"role": "nobody", "content": "19"}])
"""


@pytest.fixture
def worlds(tmp_path: Path) -> Path:
    (tmp_path / "worlds.py").write_text(WORLDS)
    return tmp_path / "worlds.py"


def test_an_environment_may_answer_in_tokens_and_give_the_reward(tokenizer: Any, worlds: Path) -> None:
    row, _ = converse(tokenizer, ["a", "b"], worlds, "Scoring")
    assert [token for token, sampled in zip(row.token_ids, row.mask, strict=True) if not sampled] == [5, 6]
    assert row.scored is not None
    assert row.scored.value == 0.5


def test_a_turn_that_ends_with_the_last_token_is_answered(tokenizer: Any, worlds: Path) -> None:
    turn = len(tokenizer("a<|end|>")["input_ids"])
    row, _ = converse(tokenizer, ["a", "b"], worlds, "Last", limit=turn)
    assert row.scored is not None
    assert (row.scored.value, row.truncated) == (0.75, False)
    row, _ = converse(tokenizer, ["a", "b"], worlds, "Scoring", limit=turn)  # which would go on
    assert row.scored is not None
    assert (row.scored.value, row.truncated, len(row.token_ids)) == (0.25, True, turn)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Raising", "KeyError: 'lost'"),
        ("Hanging", r"no answer within 2 s"),
        ("Refusing", "RuntimeError: not today"),
        ("Wordless", "step returned str, not an Observation"),
        ("Number", "the content is int instead of text"),
        ("Null", "the content is null"),
        ("Surrogate", "not valid Unicode"),
        ("Text", "not a list of messages"),
        ("Missing", "NoneType"),
        ("TokenText", "'str' object cannot be interpreted as an integer"),
        ("Fraction", "'float' object cannot be interpreted as an integer"),
        ("Huge", "token_ids hold 1000000000, and the tokenizer knows [0-9]+ tokens"),
        ("Negative", "token_ids hold -1"),
        ("Refused", "the chat template rejects its messages: no such role"),
    ],
)
def test_an_environment_that_fails_costs_one_conversation(
    tokenizer: Any, worlds: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    strict = "{% for m in messages if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", strict + tokenizer.chat_template)
    row, _ = converse(tokenizer, ["a", "b"], worlds, name, environment_timeout=2)
    assert row.turns == 1
    assert row.scored is not None
    assert row.scored.cause == "environment_error"
    assert re.search(reason, row.scored.failure)


def test_a_score_that_is_not_a_number_ends_the_run(tokenizer: Any, worlds: Path) -> None:
    with pytest.raises(RewardError, match="returned nan"):
        converse(tokenizer, ["a"], worlds, "Nonsense")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def __init__(self, prompt): ...", "missing a required argument: 'prompt'"),
        ("def reset(self, prompt): ...", "Game.reset.* too many positional arguments"),
        ("def reset(self, prompt, seed): ...\n    def step(self): ...", "Game.step.* too many positional arguments"),
        ("def reset(self, prompt, seed): ...", "Game has no method step"),
    ],
)
def test_an_environment_that_cannot_be_called_is_refused(tmp_path: Path, source: str, words: str) -> None:
    file = tmp_path / "game.py"
    file.write_text(f"class Game:\n    {source}\n")
    with pytest.raises(ConfigError, match=f"rollout.environment: {words}|rollout.environment: Game.*{words}"):
        environment_class(CustomCode(path=file, name="Game"))


def test_hanging_calls_delay_the_batch_by_no_more_than_their_timeout() -> None:
    over = threading.Event()
    late = Failure("no answer within 0.2 s")
    assert call_each([over.wait, lambda: 1, over.wait, lambda: 2], timeout=0.2, at_once=1) == [late, 1, late, 2]
    over.set()
    assert call_each([], timeout=1, at_once=1) == []


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ messages | length }}" + template
        with pytest.raises(DataError, match="writes earlier turns differently"):
            MessageTokens(tokenizer, DataConfig())([{"role": "user", "content": "19"}], tokenizer.eos_token_id)
    finally:
        tokenizer.chat_template = template


def batch_of(row: Trajectory) -> Batch:
    return Batch.from_responses([row.prompt], [row.token_ids], [row.log_probs], [row.mask])


def test_the_environments_tokens_are_excluded_from_the_loss(tokenizer: Any) -> None:
    row, _ = converse(tokenizer, ["calc: 12+7", "#### 19"])
    batch, mask = batch_of(row), torch.tensor([row.mask])
    assert torch.equal(batch.response_mask, mask)
    packed = PackedRows.of(batch)
    assert packed.token_ids.tolist() == [[*row.prompt, *row.token_ids]]
    assert packed.targets.tolist() == row.sampled

    model = create_model(tokenizer, ModelShape(), seed=0)
    logits = model(packed.token_ids).logits[0, len(row.prompt) - 1 : -1]
    plain = logits.log_softmax(dim=1).gather(1, torch.tensor(row.token_ids).unsqueeze(1)).squeeze(1)
    network = PolicyNetwork(model, temperature=1.0)
    log_probs, entropy = network(packed)
    torch.testing.assert_close(log_probs, plain.where(mask, 0.0))
    assert not entropy[~mask].any()

    # Values at the environment's tokens change neither advantages nor KL nor returns.
    def learned(noise: float) -> list[torch.Tensor]:
        values, reference = torch.linspace(0, 1, mask.shape[1]).unsqueeze(0), log_probs.detach() - 0.1
        values, reference = values.masked_fill(~mask, noise), reference.masked_fill(~mask, noise)
        kl = kl_estimate(log_probs.detach(), reference, "k1")
        rewards = token_rewards(torch.tensor([1.0]), kl, mask, kl_coefficient=0.1)
        return [rewards, *generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.8)]

    for clean, noisy in zip(learned(0.0), learned(1e6), strict=True):
        assert torch.equal(clean, noisy)
        assert not clean[~mask].any()
    assert learned(0.0)[0][0, -1] > 0.9  # the score stands at the policy's last token
