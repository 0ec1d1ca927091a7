"""A calculator that a model may use before it answers. Copy this file and replace the calculator with your own tool.

The model writes `calc: 17+25` and ends its turn; the environment says `42`, and the model goes on. A turn with a final
answer, `#### 42`, ends the conversation, and the run's reward scores it.
"""

import ast
import operator
import re
from collections.abc import Callable

from trainer.data.dataset import Prompt
from trainer.experience.environment import Observation, Turn

CALL = re.compile(r"calc:\s*([-+*/(). \d]{1,64})")
HELP = "Write calc: EXPRESSION to calculate, or #### ANSWER to answer."
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """One conversation. The calculator is stateless; a game would keep its state in `self`."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Prepares nothing. A game would draw its secret with `random.Random(seed)` or read `prompt.extra_info`."""

    def step(self, turn: Turn) -> Observation:
        if "####" in turn.text:
            return Observation(done=True)
        call = CALL.search(turn.text)
        return Observation(messages=[{"role": "user", "content": calculate(call[1]) if call else HELP}])


def calculate(expression: str) -> str:
    """The value of an arithmetic expression as text, or what is wrong with it."""
    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"error: {error}"


def value(node: ast.expr) -> float:
    """The value of a parsed expression of numbers and the four operators. Raises ValueError for anything else."""
    match node:
        case ast.Constant(int() | float() as number):
            return float(number)
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(left), value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -value(operand)
    raise ValueError("only numbers, + - * / and brackets")
