"""A job that trains, and then searches its files and process lists for the secrets in its environment.

`test_planted_secrets.py` runs the text of this file as a command of `launch`, so that Ray is up. REVERSED names the
secrets backwards: the search must not find its own list. Prints a line RESULT with a JSON document.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from trainer.data.arithmetic import write_arithmetic
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model

HERE = Path("/tmp/work")
ROOTS = ("/tmp", "/workspace", "/root", "/home", "/var", "/run", "/dev/shm", "/etc", "/opt/slipway/app")
TRAINER = (sys.executable, "-m", "trainer")
REWARD = """
import time
from pathlib import Path

def score(**arguments):
    calls = Path(__file__).with_suffix(".calls")
    with calls.open("a") as file:
        file.write("x")
    time.sleep(9 if 8 < calls.stat().st_size < 11 else 0)  # a stall in the second step
    if calls.stat().st_size % 2:  # a run ends at once if all calls of its first step fail
        raise OSError("a reward that fails")
    return 1.0
"""


def main() -> None:
    values = {name: value[::-1].encode() for name, value in json.loads(os.environ["REVERSED"]).items()}
    values["RAY_AUTH_TOKEN"] = os.environ["RAY_AUTH_TOKEN"].encode()
    settings = prepare()
    (HERE / "decoy").write_bytes(values["DECOY"])
    decoy = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", values["DECOY"].decode()])
    lists, done = set[bytes](), threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    lists.add((process / "cmdline").read_bytes())
                except OSError:  # it has ended
                    continue

    threading.Thread(target=watch, daemon=True).start()
    statuses = run_commands(settings)
    done.set()
    decoy.kill()
    places, searched = [], 0
    for path, content, mode in files():
        searched += 1
        places += [f"{name} in {path.name}, directory of mode {mode}" for name in values if values[name] in content]
    places += [f"{name} in the process list" for line in lists for name in values if values[name] in line]
    written = sorted({path.name for pattern in ("runs/*/*", "reports/*", "logs/*") for path in HERE.glob(pattern)})
    result = {"statuses": statuses, "searched": searched, "found": places, "written": written, "processes": len(lists)}
    sys.stdout.write(f"RESULT {json.dumps(result | {'log': log().read_text()})}\n")


def log() -> Path:
    return HERE / "commands.log"


def prepare() -> list[str]:
    """Model, data and reward function; the settings of the run."""
    train, _, held_out = write_arithmetic(HERE / "data", 16, 4, 9, 0.75, 0)
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, HERE / "model")
    (HERE / "reward.py").write_text(REWARD)
    (HERE / "reports").mkdir()
    return [
        *(f"model.path={HERE}/model", f"data.train_files={train}", f"data.validation_files={held_out}"),
        *("data.max_prompt_length=128", "data.train_batch_size=4", "rollout.samples_per_prompt=2"),
        *("actor.mini_batch_size=8", "rollout.engine=transformers", "algorithm.advantage=grpo"),
        *("algorithm.kl_coefficient=0", "trainer.total_steps=2", "trainer.save_freq=1", "trainer.redundancy=1"),
        *(f"trainer.output_dir={HERE}/runs", "trainer.loggers=[wandb,mlflow]", "trainer.stall_seconds=2"),
        *("trainer.profiler.enable=true", "trainer.profiler.steps=[1]"),
        *(f"reward.custom_function.path={HERE}/reward.py", "reward.custom_function.name=score"),
    ]


def run_commands(settings: list[str]) -> dict[str, int]:
    """The exit status of a run, of commands that read it, and of some that fail."""
    with log().open("wb") as output:

        def run(*words: str | Path) -> int:
            return subprocess.run(words, stdout=output, stderr=output, check=False).returncode

        statuses = {"train": run(*TRAINER, "train", *settings)}
        run_directory = next((HERE / "runs").glob("*/metrics.jsonl")).parent  # `runs` holds those of MLflow, too
        return {
            **statuses,
            "verify": run(*TRAINER, "verify", run_directory),
            "report": run(*TRAINER, "report", run_directory),
            "train without data": run(*TRAINER, "train", *settings, "data.train_files=/nowhere"),
            "explain": run("launch", "explain"),
            "preflight": run("sh", "-c", "ulimit -n 512 && exec launch preflight"),
        }


def files() -> Iterator[tuple[Path, bytes, str]]:
    """Every file that a job may have written, with its content and the mode of its directory."""
    for root in ROOTS:
        for folder, _, names in os.walk(root):
            for path in (Path(folder, name) for name in names):
                try:
                    if path.is_file() and not path.is_symlink():
                        yield path, path.read_bytes(), f"{path.parent.stat().st_mode:o}"[-3:]
                except OSError:  # Ray removed it meanwhile
                    continue


if __name__ == "__main__":
    main()
