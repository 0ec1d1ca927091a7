"""Secrets are planted in the environment of a job that trains; then every file and process list is searched for them.

Only the environment of a process may hold one. The search reads whatever the job wrote: run directory, loggers, report,
logs of `launch` and Ray, temporary files.
"""

import json
import secrets
from collections.abc import Callable
from typing import Any

Job = Any  # conftest.Job

PLANTED = (
    *("SLIPWAY_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "OPENAI_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "UV_INDEX_URL", "A_SECRET_OF_MY_OWN"),
    "DECOY",  # which the job writes into a file and a command line, to show that the search finds it
)

# Runs inside the container, while Ray is up. It gets the secrets reversed, so that it does not find its own.
TRAIN_AND_SEARCH = r"""
import json, os, pathlib, subprocess, sys, threading, time
from trainer.data.arithmetic import write_arithmetic
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model

here = pathlib.Path("/tmp/work")
values = {name: value[::-1].encode() for name, value in json.loads(os.environ["REVERSED"]).items()}
values["RAY_AUTH_TOKEN"] = os.environ["RAY_AUTH_TOKEN"].encode()
train, _, held_out = write_arithmetic(here / "data", 16, 4, 9, 0.75, 0)
tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, here / "model")
(here / "reward.py").write_text("def score(**arguments):\n    raise OSError('a reward that fails')\n")
settings = [
    f"model.path={here}/model", f"data.train_files={train}", f"data.validation_files={held_out}",
    "data.max_prompt_length=128", "data.train_batch_size=4", "rollout.samples_per_prompt=2", "actor.mini_batch_size=8",
    "rollout.engine=transformers", "algorithm.advantage=grpo", "algorithm.kl_coefficient=0", "trainer.total_steps=2",
    "trainer.save_freq=1", f"trainer.output_dir={here}/runs", "trainer.loggers=[wandb,mlflow]",
    "trainer.profiler.enable=true", "trainer.profiler.steps=[1]", f"reward.custom_function.path={here}/reward.py",
    "reward.custom_function.name=score",
]
(here / "decoy").write_bytes(values["DECOY"])
decoy = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", values["DECOY"].decode()])
lists, done = set(), threading.Event()

def watch():
    while not done.wait(0.2):
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                lists.add((process / "cmdline").read_bytes())
            except OSError:
                pass

threading.Thread(target=watch, daemon=True).start()
with (here / "train.log").open("wb") as log:
    status = subprocess.run([sys.executable, "-m", "trainer", "train", *settings], stdout=log, stderr=log).returncode
done.set()
decoy.kill()
found, searched = [], 0
for root in ("/tmp", "/workspace", "/root", "/home", "/var", "/run", "/dev/shm", "/etc", "/opt/slipway/app"):
    for folder, _, files in os.walk(root):
        for path in (pathlib.Path(folder, file) for file in files):
            try:
                if not path.is_file() or path.is_symlink():
                    continue
                content, mode = path.read_bytes(), f"{path.parent.stat().st_mode:o}"[-3:]
            except OSError:  # Ray removed it meanwhile
                continue
            searched += 1
            found += [f"{name} in {path.name}, directory of mode {mode}" for name in values if values[name] in content]
found += [f"{name} in the process list" for line in lists for name in values if values[name] in line]
result = {"status": status, "log": (here / "train.log").read_text(), "searched": searched, "found": found}
print("RESULT", json.dumps(result | {"processes": len(lists)}), flush=True)
"""


def test_no_secret_of_the_environment_is_in_a_file_or_a_process_list(job: Callable[..., Job]) -> None:
    values = {name: f"planted-{secrets.token_hex(16)}" for name in PLANTED}
    reports = {"SLIPWAY_LOG_DIR": "/tmp/work/logs", "SLIPWAY_REPORT_DIR": "/tmp/work/reports", "WANDB_MODE": "offline"}
    backwards = json.dumps({name: value[::-1] for name, value in values.items()})
    node = job(1, **values, **reports, REVERSED=backwards)
    node.start(0, "--", "python", "-c", TRAIN_AND_SEARCH)
    assert node.wait(240) == {"node0": 0}, node.outputs()
    output = node.output("node0")
    assert not [name for name, value in values.items() if value in output]
    result = json.loads(output.split("RESULT ")[1].splitlines()[0])
    assert result["status"] == 0, result["log"]
    assert result["searched"] > 100
    assert result["processes"] > 10  # different command lines
    assert sorted(result["found"]) == [
        "DECOY in decoy, directory of mode 755",
        "DECOY in the process list",
        "RAY_AUTH_TOKEN in attach.json, directory of mode 700",  # `launch attach` reads it
    ]
