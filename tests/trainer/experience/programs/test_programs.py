"""Agent programs, started as real processes, that talk to the policy over HTTP. A script plays the policy where only
its words matter; Transformers' engine samples where log-probs matter."""

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.experience.conversations.scripted_policy import pieces
from tests.trainer.experience.one_engine import OneEngine
from tests.trainer.experience.programs.scripted_program import CLIENT, TEMPLATE
from trainer.compat.settings import load_config
from trainer.config.sections.data import DataConfig
from trainer.config.sections.rollout import ProgramConfig
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.data.formats.chat_template import use_chat_template
from trainer.errors import ConfigError
from trainer.experience.collector import Experience, Scores, completed
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.programs.endpoint import Line
from trainer.experience.programs.process import ProgramProcess
from trainer.models.packing import PackedRows
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.rollout.end_tokens import end_token_ids
from trainer.rollout.engine import open_engine
from trainer.weights.buckets import pack, store

TWO_TURNS = """
choice = ask(messages, temperature=0.2)
messages += [choice["message"], {"role": "user", "content": "sure?"}]
choice = ask(messages)
print(json.dumps({"score": 0.5}))
"""


def test_a_program_talks_to_the_policy_and_scores_itself(tokenizer: Any, play: Callable[..., Any]) -> None:
    (row,), engines = play(TWO_TURNS)
    assert tokenizer.decode(row.prompt) == "<|user|>What?<|assistant|>"
    assert pieces(tokenizer, row) == [
        ("#### 19<|end|>", True),
        ("<|user|>sure?<|assistant|>", False),
        ("yes<|end|>", True),
    ]
    assert (row.turns, row.answers, row.scored.value, row.scored.failure) == (2, 1, 0.5, "")
    assert row.log_probs == [-0.5 if sampled else 0.0 for sampled in row.mask]
    # Each request to the engines continues the tokens before it: none is rendered and tokenised again.
    whole = (*row.prompt, *row.token_ids)
    for (request,) in engines.asked:
        assert request.prompt == whole[: len(request.prompt)]


def test_networks_read_the_prompt_that_the_program_wrote(tokenizer: Any, play: Callable[..., Any]) -> None:
    program = "ask([{'role': 'system', 'content': 'Think.'}, *messages])"
    (row,), _ = play(program)
    assert tokenizer.decode(row.prompt) == "<|system|>Think.<|user|>What?<|assistant|>"
    experience = Experience([Prompt(0, (1, 2), "19", "test", "What?")], [row], completed(Scores(torch.zeros(1), {})))
    packed = PackedRows.of(experience.batch())
    assert packed.token_ids.tolist() == [[*row.prompt, *row.token_ids]]


def test_a_program_without_a_score_leaves_it_to_the_reward(play: Callable[..., Any]) -> None:
    (row,), _ = play("ask(messages)\nprint('done')")
    assert (row.done, row.scored) == (True, None)


@pytest.mark.parametrize(
    ("program", "reason", "turns"),
    [
        ("raise KeyError('lost')", "program: status 1: KeyError: 'lost'", 1),
        ("ask(messages)\nraise KeyError('lost')", "program: status 1: KeyError: 'lost'", 1),
        ("pass", "program: it ended without asking the policy", 1),
        ("ask(messages)\ntime.sleep(60)", "program: no request and no end within 10 s", 1),
        ("ask(messages)\nprint('{\"score\": NaN}')", "program: its score is nan, not a finite number", 1),
        ('ask(messages)\nprint(\'{"score": "high"}\')', "program: its score is 'high'", 1),
        ("ask(messages)\nask(messages)", "does not continue the conversation", 1),
        ("ask(messages)\nask([{'role': 'user', 'content': 'Other?'}] * 3)", "message 0 differs", 1),
        ("ask(messages, n=2)", "after the refusal", 1),
        ("import os\nos.kill(os.getpid(), 9)", "program: status -9", 1),
    ],
)
def test_a_program_that_fails_costs_its_trajectory(
    play: Callable[..., Any], program: str, reason: str, turns: int
) -> None:
    lines = {"What?": "#### 19", "": "no"}  # the policy answers the row's own prompt if the program never asks
    (row,), _ = play(program, lines, environment_timeout=10)
    if reason == "after the refusal":
        assert row.scored.failure == "program: status 3: n=2 is not supported"
    else:
        assert reason in row.scored.failure
    assert (row.scored.cause, row.turns, row.done) == ("program_error", turns, True)
    assert row.environment.failed
    assert all(row.mask)


def test_a_program_that_failed_starts_again(play: Callable[..., Any], tmp_path: Path) -> None:
    once = f"""
ask(messages)
if not os.path.exists({str(tmp_path / "tried")!r}):
    open({str(tmp_path / "tried")!r}, "w").close()
    raise KeyError("lost")
print(json.dumps({{"score": 0.5}}))
"""
    (row,), _ = play(once)
    assert (row.scored.value, row.scored.cause, row.retried) == (0.5, None, ("program_error",))
    assert (row.turns, row.seed != 100) == (1, True)


def test_conversations_do_not_wait_for_each_other(play: Callable[..., Any]) -> None:
    """The second program stops until the first one has had both turns, which a lockstep would never let happen."""
    program = """
slow, done = messages[0]["content"] == "Slow?", "/tmp/programs-test-" + str(os.getppid())
choice = ask(messages)
if slow:
    while not os.path.exists(done):
        time.sleep(0.05)
    os.remove(done)
ask([*messages, choice["message"], {"role": "user", "content": "sure?"}])
if not slow:
    open(done, "w").close()
print(json.dumps({"score": 1}))
"""
    rows, _ = play(program, {"Slow?": "a", "Fast?": "b", "sure?": "yes"}, ("Slow?", "Fast?"), environment_timeout=60)
    assert [(row.turns, row.scored.value) for row in rows] == [(2, 1.0), (2, 1.0)]


def test_no_more_programs_run_at_once_than_allowed(play: Callable[..., Any]) -> None:
    program = """
import glob
mine = "/tmp/programs-test-%d-%d" % (os.getppid(), os.getpid())
open(mine, "w").close()
ask(messages)
count = len(glob.glob("/tmp/programs-test-%d-*" % os.getppid()))
os.remove(mine)
print(json.dumps({"score": count}))
"""
    names = [f"{n} What?" for n in range(5)]
    rows, _ = play(program, questions=names, processes=2, environment_timeout=60)
    assert max(row.scored.value for row in rows) <= 2


def test_the_engines_do_not_wait_for_programs_that_start(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(settings: ProgramConfig, prompt: Prompt, line: Line) -> ProgramProcess:
        if prompt.question == "Slow?":
            assert ended.wait(20)
        return ProgramProcess(settings, prompt, line)

    def noted_clear(process: ProgramProcess) -> None:
        ended.set()
        clear(process)

    ended, clear = threading.Event(), ProgramProcess.clear
    monkeypatch.setattr("trainer.experience.programs.host.ProgramProcess", start)
    monkeypatch.setattr(ProgramProcess, "clear", noted_clear)
    rows, _ = play(TWO_TURNS, {"Slow?": "a", "Fast?": "b", "sure?": "yes"}, ("Slow?", "Fast?"), environment_timeout=60)
    assert [row.turns for row in rows] == [2, 2]


def test_few_programs_start_at_once(play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says how many others there are when it asks; it may have 8 neighbours, but starts alone."""
    monkeypatch.setattr("trainer.experience.programs.host._STARTS_PER_CORE", 1)
    monkeypatch.setattr("trainer.experience.programs.host.os.sched_getaffinity", lambda _: {0})
    program = """
import glob
time.sleep(0.3)
mine = "/tmp/starts-test-%d-%d" % (os.getppid(), os.getpid())
before = len(glob.glob("/tmp/starts-test-%d-*" % os.getppid()))
open(mine, "w").close()
time.sleep(0.3)
count = len(glob.glob("/tmp/starts-test-%d-*" % os.getppid()))
os.remove(mine)
ask(messages)
print(json.dumps({"score": max(before, count - 1)}))
"""
    rows, _ = play(program, questions=[f"{n} What?" for n in range(3)], processes=8, environment_timeout=60)
    assert [row.scored.value for row in rows] == [0.0] * 3


def test_the_token_limit_ends_the_program(tokenizer: Any, play: Callable[..., Any]) -> None:
    length = len(tokenizer("#### 19<|end|>")["input_ids"])
    (row,), _ = play(TWO_TURNS, limit=length + 2)
    assert (row.truncated, row.scored, len(row.token_ids)) == (True, None, length)
    (row,), _ = play(TWO_TURNS, limit=length - 1)
    assert (row.truncated, len(row.token_ids)) == (True, length - 1)


def test_a_limit_of_the_request_cuts_its_turn_and_a_lost_answer_is_sent_again(
    tokenizer: Any, play: Callable[..., Any]
) -> None:
    program = """
choice = ask(messages, max_tokens=2)
assert choice["finish_reason"] == "length", choice
again = ask(messages, {"x-stainless-retry-count": "1"}, max_tokens=2)
assert again["message"] == choice["message"]
choice = ask([*messages, choice["message"], {"role": "user", "content": "sure?"}])
assert choice["finish_reason"] == "stop", choice
"""
    (row,), _ = play(program)
    assert row.scored is None
    cut = tokenizer.decode(tokenizer("#### 19<|end|>")["input_ids"][:2])
    # The template closes the turn that the policy did not end itself.
    assert pieces(tokenizer, row) == [(cut, True), ("<|end|><|user|>sure?<|assistant|>", False), ("yes<|end|>", True)]
    assert row.turns == 2


def test_tools_of_a_program_are_in_the_prompt_and_calls_come_back(tokenizer: Any, play: Callable[..., Any]) -> None:
    program = """
tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
choice = ask(messages, tools=tools, tool_choice="auto")
(call,) = choice["message"]["tool_calls"]
assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so", choice
assert json.loads(call["function"]["arguments"]) == {"x": 1}
answer = {"role": "tool", "tool_call_id": call["id"], "content": "19"}
ask([*messages, choice["message"], answer], tools=tools)
"""
    called = 'so <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    (row,), _ = play(program, {"What?": called, "<|tool|>19": "yes"})
    assert row.scored is None
    assert tokenizer.decode(row.prompt).startswith("[add]<|user|>")
    assert pieces(tokenizer, row)[1] == ("<|tool|>19<|assistant|>", False)


def test_streamed_answers(play: Callable[..., Any]) -> None:
    program = """
body = {"model": "policy", "messages": messages, "stream": True}
events = [line[6:] for line in post(body).decode().splitlines() if line]
assert events[-1] == "[DONE]"
first, last = map(json.loads, events[:2])
assert first["choices"][0]["delta"]["content"] == "#### 19", first
assert last["choices"][0]["finish_reason"] == "stop"
"""
    (row,), _ = play(program)
    assert row.scored is None


def test_a_program_finds_nothing_of_the_run_in_its_environment(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    program = """
ask(messages)
known = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "TMPDIR"}
names = {name for name in os.environ if not name.startswith("OPENAI_")} - known
assert not names, names
assert os.getcwd() == os.path.realpath(os.environ["HOME"])
"""
    (row,), _ = play(program)
    assert row.scored is None


def test_a_program_finds_no_path_to_its_output(play: Callable[..., Any]) -> None:
    """It could put a link or a pipe there, which the trainer would follow."""
    program = """
ask(messages)
targets = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in range(3)]
assert all(target.endswith(" (deleted)") for target in targets), targets
"""
    (row,), _ = play(program)
    assert row.scored is None


def test_the_files_of_a_program_are_removed_however_deep(
    play: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = """
ask(messages)
for _ in range(3000):
    os.mkdir("a")
    os.chdir("a")
"""
    (row,), _ = play(program, environment_timeout=60)
    assert row.scored is None
    deadline = time.monotonic() + 60
    while list(tmp_path.glob("program-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_endpoint_needs_the_trajectorys_own_key(play: Callable[..., Any]) -> None:
    program = """
for address, key, status in (("", "wrong", 401), ("/x", os.environ["OPENAI_API_KEY"], 404)):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + address + "/models", headers={"Authorization": "Bearer " + key}
    )
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        assert error.code == status, error.code
    else:
        raise SystemExit("let in")
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=headers)
models = json.load(urllib.request.urlopen(request))
assert [model["id"] for model in models["data"]] == [os.environ["OPENAI_MODEL"]]
ask(messages)
"""
    (row,), _ = play(program)
    assert row.scored is None


def test_a_program_that_does_not_exist_is_refused(tokenizer: Any) -> None:
    config, _ = load_config([], ["rollout.agent=program", "rollout.program.command=[no-such-program]"])
    with pytest.raises(ConfigError, match="no such program"):
        Conversations(config, None, tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="belong together"):
        load_config([], ["rollout.agent=program"])


def test_recorded_log_probs_are_those_of_the_recorded_tokens(tmp_path: Path) -> None:
    """With Transformers' engine: turns in segments, two programs at once, and the model's own log-probs afterwards."""
    texts = ["What is 12 + 7? #### 19 sure? tool user system assistant"]
    tokenizer = use_chat_template(build_tokenizer(texts), DataConfig(chat_template=TEMPLATE))
    model = create_model(tokenizer, ModelShape(), seed=0)
    save_model(model, tokenizer, tmp_path / "model")
    (tmp_path / "agent.py").write_text(CLIENT + TWO_TURNS.replace("temperature=0.2", "max_tokens=9"))
    config = Config.model_validate(
        {
            "model": {"path": tmp_path / "model"},
            "rollout": {
                "agent": "program",
                "program": {"command": [sys.executable, str(tmp_path / "agent.py")]},
                "segment_length": 4,
                "environment_timeout": 60,
            },
            "data": {"max_response_length": 60, "max_prompt_length": 60},
        }
    )
    engine = open_engine("transformers", config, "cpu", end_token_ids(tmp_path / "model"))
    engine.replace_weights([store(bucket) for bucket in pack(model.named_parameters(), torch.float32)])
    conversations = Conversations(config, OneEngine(engine), tokenizer)  # type: ignore[arg-type]
    prompts = [Prompt(n, (1,), "19", "test", f"{n} What?") for n in range(2)]
    rows = conversations.begin(prompts, [1, 2], temperature=1.0)
    conversations.finish(rows)
    conversations.close()
    for row in rows:
        assert row.scored is not None
        assert not row.scored.failure
        assert row.turns == 2
        tokens = torch.tensor([[*row.prompt, *row.token_ids]])
        logits = model(tokens).logits[0, len(row.prompt) - 1 : -1]
        plain = logits.log_softmax(dim=1).gather(1, torch.tensor(row.token_ids).unsqueeze(1)).squeeze(1)
        mask = torch.tensor(row.mask)
        torch.testing.assert_close(torch.tensor(row.log_probs)[mask], plain[mask].detach(), atol=1e-4, rtol=1e-4)
