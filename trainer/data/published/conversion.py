"""Rows of published data sets as columns of the trainer's files."""

import json
from collections.abc import Mapping
from typing import Any

from trainer.data.answers import final_answer
from trainer.data.latex import last_boxed

Parts = dict[str, Any]
"""A row's values by part: question and answer, question and tests, or prompt, chosen and rejected."""

_GSM8K = 'Let\'s think step by step and output the final answer after "####".'
_MATH = "Let's think step by step and output the final answer within \\boxed{}."
# DAPO's prompt (Yu et al. 2025, arXiv:2503.14476)
_DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)
_PROGRAM = "Write a Python program that reads standard input and writes standard output. End with it in a code block."
_FUNCTION = "Write the Python function {name}. End with it in a code block."


class UnusableRowError(Exception):
    """A row cannot be trained on; the message says why."""


def gsm8k(parts: Parts) -> dict[str, Any]:
    """Raises UnusableRowError like the others: here if the answer does not end in `#### N`."""
    question, answer = _text(parts, "question"), _text(parts, "answer")
    truth = final_answer(answer)
    if truth is None:
        raise UnusableRowError("the answer does not end in `#### N`")
    return _prompt("math", f"{question} {_GSM8K}", truth, question, answer)


def math(parts: Parts) -> dict[str, Any]:
    """The truth is what the solution boxes."""
    question, answer = _text(parts, "question"), _text(parts, "answer")
    truth = last_boxed(answer)
    if truth is None:
        raise UnusableRowError("the answer has no \\boxed{...}")
    return _prompt("math", f"{question} {_MATH}", truth, question, answer)


def dapo(parts: Parts) -> dict[str, Any]:
    """The answer is the truth; a question that has DAPO's instruction keeps it."""
    question, answer = _text(parts, "question"), _text(parts, "answer")
    first, last = _DAPO
    prompt = question if question.startswith(first) else f"{first}\n\n{question}\n\n{last}"
    return _prompt("math", prompt, answer, question, answer)


def code(parts: Parts) -> dict[str, Any]:
    """The truth is the tests as JSON: inputs, outputs and perhaps fn_name."""
    question, tests = _text(parts, "question"), _tests(parts["tests"])
    name = tests.get("fn_name")
    asked = _FUNCTION.format(name=name) if name else _PROGRAM
    return _prompt("code", f"{question}\n\n{asked}", json.dumps(tests), question, "")


def preference(parts: Parts) -> dict[str, Any]:
    """Each part is text or a list of messages. The preferred response is the truth, which no rule reads."""
    prompt, chosen, rejected = (parts[name] for name in ("prompt", "chosen", "rejected"))
    if not all(map(_has_text, (prompt, chosen, rejected))):
        raise UnusableRowError("the prompt or a response is empty, or neither text nor a list of messages")
    if chosen == rejected:
        raise UnusableRowError("chosen and rejected are the same")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = chosen if isinstance(chosen, str) else chosen[-1]["content"]
    row = _prompt("chat", "", answer, messages[-1]["content"], answer)
    row["reward_model"]["style"] = "model"
    return {**row, "prompt": messages, "chosen": chosen, "rejected": rejected}


def _has_text(value: object) -> bool:
    """Whether this is text, or a list of messages the last of which has text."""
    messages = [{"content": value}] if isinstance(value, str) else value
    return (
        isinstance(messages, list)
        and all(isinstance(message, Mapping) and isinstance(message.get("content"), str) for message in messages)
        and bool(messages)
        and bool(messages[-1]["content"].strip())
    )


def _prompt(ability: str, prompt: str, truth: str, question: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"question": question, "answer": answer},
    }


def _text(parts: Parts, name: str) -> str:
    value = parts[name]
    if isinstance(value, int | float):
        value = str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnusableRowError(f"the {name} is empty")
    if not isinstance(value, str):
        raise UnusableRowError(f"the {name} is {type(value).__name__} instead of text")
    return value.strip()


def _tests(value: object) -> dict[str, Any]:
    """The tests of a row, which may be JSON: inputs and outputs, or a list of pairs of an input and an output."""
    try:
        tests: Any = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UnusableRowError(f"the tests are not JSON: {error}") from error
    if isinstance(tests, list) and tests and all(isinstance(test, Mapping) and "input" in test for test in tests):
        if any(test.get("testtype") == "functional" for test in tests):
            raise UnusableRowError("the tests call a function that they do not name")
        tests = {"inputs": [test["input"] for test in tests], "outputs": [test.get("output") for test in tests]}
    if not isinstance(tests, Mapping) or not tests.get("inputs") or not tests.get("outputs"):
        raise UnusableRowError("the tests have no inputs or no outputs")
    if len(tests["inputs"]) != len(tests["outputs"]):
        raise UnusableRowError("the tests have not as many outputs as inputs")
    return {name: tests[name] for name in ("inputs", "outputs", "fn_name") if tests.get(name)}
