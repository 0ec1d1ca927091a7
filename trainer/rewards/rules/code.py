"""The last program of the response must pass tests: it is run in a sandbox, here or on a server."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.errors import RewardError
from trainer.rewards.sandbox import programs as sandbox
from trainer.rewards.sandbox.fusion import run_remotely
from trainer.rewards.sandbox.sandboxed import PRELUDE
from trainer.rows import Parameter, RewardRule

_STARTING = 15.0  # seconds beside those of the tests
_REQUESTS = 10  # tests of a program that run at once on a server
_INTEGER = re.compile(r"[+-]?[0-9]+")
# Calls the function with the arguments on standard input. What the function writes itself is left out.
_CALL = """
import contextlib as _contextlib, io as _io, json as _json, sys as _sys
with _contextlib.redirect_stdout(_io.StringIO()):
    _place = Solution() if "Solution" in globals() else None
    _found = globals()["{function}"] if _place is None else getattr(_place, "{function}")
    _result = _found(*_json.loads(_sys.stdin.read()))
_json.dump(_result, _sys.stdout)
"""


def code(
    response: str,
    ground_truth: object,
    code_tests: int,
    code_seconds: float,
    code_memory_mb: int,
    code_sandbox_url: str | None = None,
) -> dict[str, float]:
    """The share of the first `code_tests` tests that the program passes; `solved` is 1.0 if it passes them all.

    The program is the last block ```python of the response. The tests are those of APPS and TACO, as a mapping or as
    JSON: `inputs` and `outputs` of standard input and output, or with `fn_name` arguments and results of a function.
    """
    function, inputs, outputs = _tests(ground_truth, code_tests)
    program = response.split("```python")[-1].split("```")[0]
    limits = sandbox.Limits(code_seconds, code_memory_mb)
    if code_sandbox_url is None:
        outcomes = sandbox.run_tests(program, function, inputs, limits)
    else:
        outcomes = _run_remotely(code_sandbox_url, program, function, inputs, limits)
    same = _same_text if function is None else _same_result
    passed = [given is not None and same(given, wanted) for given, wanted in zip(outcomes, outputs, strict=True)]
    return {"score": sum(passed) / len(passed), "solved": float(all(passed))}


def _run_remotely(
    url: str, program: str, function: str | None, inputs: Sequence[Any], limits: sandbox.Limits
) -> list[str | None]:
    """What `sandbox.run_tests` returns, from a SandboxFusion server."""
    if function is not None:
        defined = f"{PRELUDE}\nglobals().pop({function!r}, None)"  # the program must define it itself
        program = f"{defined}\n{program}\n{_CALL.format(function=function)}"
        inputs = [json.dumps(given) for given in inputs]
    with ThreadPoolExecutor(_REQUESTS) as threads:
        ended = threads.map(lambda given: run_remotely(url, program, given, limits.seconds, limits.memory_mb), inputs)
        return [None if result.error else result.stdout for result in ended]


def _tests(ground_truth: object, most: int) -> tuple[str | None, list[Any], list[Any]]:
    """Function or None, inputs and outputs. Raises RewardError if these are no tests."""
    try:
        tests: Any = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        inputs, outputs, function = tests["inputs"], tests["outputs"], tests.get("fn_name")
        if not len(inputs) == len(outputs) > 0 or any(
            isinstance(column, str | Mapping) for column in (inputs, outputs)
        ):
            raise ValueError("not as many outputs as inputs")
        inputs, outputs = list(inputs)[:most], list(outputs)[:most]
        if function is None:
            return None, [_joined(text) for text in inputs], [_joined(text) for text in outputs]
        return function, [_arguments(given) for given in inputs], [_parsed(wanted) for wanted in outputs]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"the reward rule code needs tests, not the ground truth {str(ground_truth)[:200]!r}",
            hint="write {'inputs': [...], 'outputs': [...]}, with 'fn_name' for a function and JSON in both",
        ) from error


def _joined(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _arguments(given: Any) -> list[Any]:
    return [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)


def _parsed(wanted: Any) -> Any:
    return json.loads(wanted) if isinstance(wanted, str) else wanted


def _same_result(given: str, wanted: Any) -> bool:
    """Whether a result is the wanted one, or the only element of a list that holds it."""
    try:
        result = json.loads(given)
    except (ValueError, RecursionError):
        return False
    return bool(result == wanted or (isinstance(wanted, list) and wanted and result == wanted[0]))


def _same_text(given: str, wanted: str) -> bool:
    """Whether the words of every line are equal; numbers may differ by rounding unless both are integers."""
    lines, wanted_lines = ([line.split() for line in text.strip().splitlines()] for text in (given, wanted))
    return len(lines) == len(wanted_lines) and all(
        len(line) == len(other) and all(map(_same_word, line, other))
        for line, other in zip(lines, wanted_lines, strict=True)
    )


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    try:
        if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(wanted):
            return int(word) == int(wanted)
        return math.isclose(float(word), float(wanted), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False


def _longest(code_tests: int, code_seconds: float, **_: object) -> float:
    return _STARTING + code_tests * code_seconds


def _check(code_sandbox_url: str | None, **_: object) -> str:
    return sandbox.check() if code_sandbox_url is None else f"programs run at {code_sandbox_url}"


ROW = RewardRule(
    name="code",
    score=code,
    sources=("codecontests", "apps", "codeforces", "taco", "slipway/synthetic-code"),
    parameters={
        "code_tests": Parameter(
            type=int, default=10, description="tests of a program, the first ones", constraints={"gt": 0}
        ),
        "code_seconds": Parameter(
            type=float, default=5.0, description="seconds that a test may take", constraints={"gt": 0}
        ),
        "code_memory_mb": Parameter(
            type=int, default=1024, description="address space of a program, MiB", constraints={"ge": 64}
        ),
        "code_sandbox_url": Parameter(
            type=str | None,
            description="SandboxFusion server that runs the programs, like http://HOST:8080/run_code; null: this image",
        ),
    },
    may_hang=True,
    time_limit=_longest,
    check=_check,
)
