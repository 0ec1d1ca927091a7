"""Environments of hubs, as their users write them: files of verifiers, and servers of OpenEnv."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NEMO_GYM_PYTHON = os.environ.get("NEMO_GYM_PYTHON", "")  # NeMo-Gym needs Python 3.12, its hub does not
PYTHON = os.environ.get("HUB_PYTHON", "")
needs_hubs = pytest.mark.skipif(not PYTHON, reason="HUB_PYTHON names no Python with verifiers and openenv")
_START_SECONDS = 120.0

WORDS = '''
"""Rows are questions about a number; the second turn asks again, where `turns` is 2."""
import verifiers as vf
from datasets import Dataset

def load_environment(rows=4, turns=1, data=True, tools=False, **behaviour):
    questions = [{"question": "What is %d?" % number, "answer": str(number)} for number in range(rows)]
    source = {"dataset" if data else "eval_dataset": Dataset.from_list(questions)}
    rubric = vf.Rubric(funcs=[exact, words], weights=[1.0, 0.0])
    if tools:
        return vf.ToolEnv(tools=[add], max_turns=4, **source, rubric=rubric)
    if turns == 1 and not behaviour:
        return vf.SingleTurnEnv(**source, rubric=rubric)
    return Twice(max_turns=turns, **source, rubric=rubric, behaviour=behaviour)

def exact(completion, answer, **_):
    return float(completion[-1]["content"].strip().endswith(answer))

def words(completion, **_):
    return float(len(completion))

def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second

class Twice(vf.MultiTurnEnv):
    def __init__(self, behaviour, **settings):
        super().__init__(**settings)
        self.behaviour = behaviour

    async def setup_state(self, state):
        import asyncio, os, time
        if "raises" in self.behaviour:
            raise KeyError(self.behaviour["raises"])
        if "dies" in self.behaviour:
            os._exit(3)
        if "blocks" in self.behaviour:
            time.sleep(self.behaviour["blocks"])
        if "waits" in self.behaviour:
            await asyncio.sleep(self.behaviour["waits"])
        return state

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "sure?"}]
'''

GAME = '''
"""A game of two turns: the policy's word earns a half if it is the number of the episode, a quarter if it is yes."""
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    word: str

class Seen(Observation):
    prompt: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.seed, self.turns = seed, 0
        return Seen(prompt="What is %d?" % seed)

    def step(self, action, **_):
        self.turns += 1
        if action.word == "no":
            raise RuntimeError("lost")
        reward = 0.5 if action.word == str(self.seed) else 0.25 if action.word == "yes" else 0.0
        return Seen(prompt="sure?", done=self.turns == 2, reward=reward)

    @property
    def state(self):
        return State(step_count=self.turns)

uvicorn.run(create_fastapi_app(Game, Say, Seen, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="warning")
'''

TOOLS = '''
"""A server with a tool that adds."""
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    CallToolAction, CallToolObservation, MCPEnvironment, Observation, State, create_fastapi_app,
)

class Adds(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adds")

        @server.tool
        def add(first: int, second: int) -> int:
            """Adds two numbers."""
            return first + second

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        return Observation(metadata={})

    async def step_async(self, action, **rest):
        observation = await super().step_async(action, **rest)
        if isinstance(action, CallToolAction):
            observation.reward = 1.0
        return observation

    def _step_impl(self, action, **_):
        raise NotImplementedError

    @property
    def state(self):
        return State()

uvicorn.run(
    create_fastapi_app(Adds, CallToolAction, CallToolObservation, max_concurrent_envs=64),
    port=int(sys.argv[1]), log_level="warning",
)
'''

DIGITS = '''
"""The reward is the share of characters that are digits."""
import verifiers as vf
from datasets import Dataset

def load_environment():
    rows = [{"question": "What is %d + 1?" % number, "answer": ""} for number in range(16)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[digits]))

def digits(completion, **_):
    said = completion[-1]["content"]
    return sum(map(str.isdigit, said)) / max(1, len(said))
'''

DIGITS_GAME = '''
"""A text game of two turns: each earns the share of characters that are digits."""
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    text: str

class Seen(Observation):
    prompt: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.turns = 0
        return Seen(prompt="What is %d + 1?" % (seed % 10))

    def step(self, action, **_):
        self.turns += 1
        digits = sum(map(str.isdigit, action.text)) / max(1, len(action.text))
        return Seen(prompt="And 1 more?", done=self.turns == 2, reward=digits / 2)

    @property
    def state(self):
        return State(step_count=self.turns)

uvicorn.run(create_fastapi_app(Game, Say, Seen, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="warning")
'''


GUESS_HEAD = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    guess: str

class Seen(Observation):
    prompt: str

"""
SERVED = """
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


NEMO_GYM = '''
"""A resources server with a tool that adds; the reward is 1 if the tool was called and the last turn has the answer."""
import sys
import uvicorn
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from pydantic import BaseModel

class Sum(BaseModel):
    first: int
    second: int

class Request(BaseVerifyRequest):
    expected_answer: str

class Verified(BaseVerifyResponse):
    calls: int

class Adds(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/add")(self.add)
        return app

    async def add(self, body: Sum) -> int:
        return body.first + body.second

    async def verify(self, body: Request) -> Verified:
        calls = sum(item.type == "function_call" for item in body.response.output)
        right = calls > 0 and body.expected_answer in body.response.output_text
        return Verified(**body.model_dump(), reward=float(right), calls=calls)

port = int(sys.argv[1])
config = BaseResourcesServerConfig(name="adds", host="127.0.0.1", port=port, entrypoint="app.py")
head = BaseServerConfig(host="127.0.0.1", port=11000)
client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
app = Adds(config=config, server_client=client).setup_webserver()
app.get("/health")(lambda: {})
uvicorn.run(app, port=port, log_level="warning")
'''


@contextmanager
def serving_game(program: str, directory: Path, python: str = PYTHON) -> Iterator[str]:
    """Runs the server of a game; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (directory / "server.py").write_text(program)
    server = subprocess.Popen([python, str(directory / "server.py"), str(port)])
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, f"the server did not start within {_START_SECONDS:g} s"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
    except OSError:
        return False
    return True
