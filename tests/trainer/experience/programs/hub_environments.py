"""Environments of hubs, as their users write them: a file of verifiers, and servers of OpenEnv."""

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
