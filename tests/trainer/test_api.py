"""`trainer.train` from Python: what it imports, which settings it takes, and what it refuses before a run starts."""

import base64
import functools
import importlib
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.config.pickled_code import pickled, unpickled
from trainer.config.sections.reward import RewardConfig
from trainer.config.tree import Config
from trainer.errors import ConfigError, DataError
from trainer.rewards.answer import Answer
from trainer.rewards.processes.pool import RewardPool

ROOT = Path(__file__).parents[2]
ANSWER = Answer("12ab", "3", "somewhere", {})


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_import_is_light() -> None:
    heavy = "torch", "ray", "transformers", "pydantic", "numpy", "yaml", "typer"
    assert python(f"import sys, trainer; print(sorted(set(sys.modules) & set({heavy})))").strip() == "[]"


@pytest.mark.parametrize(
    ("package", "hint"),
    [
        ("ray", "run it in the image: docker run"),
        ("pydantic", "`pip install 'slipway-rl[trainer]'`, or run it in the image: docker run"),
    ],
)
def test_a_missing_package_is_named_with_the_image_that_has_it(package: str, hint: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\nimport trainer\nfrom trainer.errors import MissingPackageError\n"
        "try: trainer.train({'model.path': 'm'})\nexcept MissingPackageError as error: print(error, error.__notes__[0])"
    )
    printed = python(code)
    assert printed.startswith(f"trainer.train needs the Python package {package}, which is not installed hint: {hint}")


@pytest.mark.parametrize(
    ("settings", "kind", "message", "hint"),
    [
        ({"actor.learning_rte": 1}, ConfigError, "actor.learning_rte: there is no such", "actor.learning_rate=VALUE?"),
        ({"actor": {"learning_rate": "x"}}, ConfigError, "actor.learning_rate=x: expected number", "actor.learning_ra"),
        ({"defaults": ["grop"], "model.path": "m"}, ConfigError, "grop.yaml", "did you mean grpo?"),
        ({"defaults": ["grpo"], "model": {"path": "/nowhere"}}, DataError, "/nowhere", "model"),
        (Config.model_validate({"model": {"path": "/nowhere"}}), DataError, "/nowhere", "model"),
    ],
)
def test_bad_settings_are_one_error_whose_traceback_shows_the_hint(
    settings: Any, kind: type[Exception], message: str, hint: str
) -> None:
    with pytest.raises(kind) as caught:
        trainer.train(settings)
    assert message in str(caught.value)
    (note,) = caught.value.__notes__
    assert note.startswith("hint: ")
    assert hint in note


def test_a_thread_is_refused_because_no_signal_reaches_it() -> None:
    errors: list[ConfigError] = []

    def train() -> None:
        with pytest.raises(ConfigError) as caught:
            trainer.train({"model.path": "/nowhere"})
        errors.append(caught.value)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "call it in the main thread" in errors[0].hint


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return 0.0


def test_a_function_brings_the_code_of_its_modules_and_what_it_is_bound_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reward processes find neither the module of the function nor the module that it imports."""
    (tmp_path / "own_parts.py").write_text("def digits(text): return sum(letter.isdigit() for letter in text)\n")
    (tmp_path / "own_rewards.py").write_text(
        "import own_parts\nfrom own_parts import digits\n"
        "def score(data_source, solution_str, ground_truth, extra_info, factor=1):\n"
        "    return factor * digits(solution_str) + own_parts.digits(ground_truth)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("own_rewards").score
    text = pickled("reward", functools.partial(function, factor=6))
    settings = RewardConfig.model_validate({"custom_function": {"pickled": text}})
    with RewardPool(settings, 1) as pool:
        assert [scored.value for scored in pool.score([ANSWER])] == [13.0]


def test_a_function_imports_installed_packages_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed_rewards-1.dist-info").mkdir()
    (tmp_path / "installed_rewards.py").write_text("def score(solution_str): return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = pickled("reward", importlib.import_module("installed_rewards").score)
    monkeypatch.delitem(sys.modules, "installed_rewards")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    with pytest.raises(ConfigError, match="cannot be loaded: ModuleNotFoundError: No module named 'installed_rewards'"):
        unpickled("setting", text)


lock = threading.Lock()
large = bytes(2**20)


@pytest.mark.parametrize(
    ("function", "message", "hint"),
    [
        (lambda **_: lock.locked(), "cannot be sent to the reward processes: ", "inside the function"),
        (lambda **_: len(large), "reads variables of 1.0 MiB, more than 1 MiB", "from a file"),
    ],
)
def test_a_function_that_cannot_reach_the_workers_is_refused(function: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer.train({"model.path": "/nowhere"}, reward=function)
    assert str(caught.value).startswith(f"trainer.train: reward: {message}")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("?", "not base64"),
        ("AAAA", "cannot be loaded: "),
        (pickled("reward", dict)[:-8] + "AAAAAAA=", "cannot be loaded: "),
        (base64.b64encode(pickle.dumps(5)).decode(), "holds a int"),
    ],
)
def test_a_damaged_function_is_one_message(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^setting: {message}"):
        unpickled("setting", text)


def test_two_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match="path and pickled are two functions"):
        trainer.train({"reward.custom_function.path": "/mine.py"}, reward=score)
