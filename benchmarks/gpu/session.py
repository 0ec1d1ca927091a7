"""All GPU measurements as jobs that run side by side on the GPUs of one host.

    python3 -m benchmarks.gpu.session OUT [--only NAME…] [--within SECONDS] [--list]

A job has GPUs, an equal share of the cores, a time limit, and network and process namespaces of its own: several Ray
clusters fit on one host, and nothing outlives its job. Rows go to OUT/NAME.jsonl, what it says to OUT/NAME.log. Jobs
start in the order of --only, and on a host that is lent for a time only while their limits fit into --within. Needs
root, torch, vLLM, Ray and Transformers; jobs with verl or TRL also what benchmarks/gpu/rivals/ says.
"""

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = f"{sys.executable} -m benchmarks.gpu."
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_AUTH_MODE": "disabled",  # each job is alone in its network
    "RAY_DEDUP_LOGS": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# In the job's namespaces, whose loopback is down at first.
PRELUDE = """ip link set lo up 2>/dev/null || python3 -c '
import fcntl, socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
flags, = struct.unpack("16xh", fcntl.ioctl(s, 0x8913, struct.pack("16sh", b"lo", 0))[:18])
fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", flags | 1))'
"""
RAY = """{python} -m ray.scripts.scripts start --head --num-cpus={cpus} --num-gpus={gpus} --port=6379 \\
  --object-store-memory=6000000000 --include-dashboard=false --disable-usage-stats --temp-dir=/tmp/r/{name} || exit 3
export RAY_ADDRESS=127.0.0.1:6379
"""


@dataclass(frozen=True)
class Job:
    """`command` runs in a shell with $ROWS, the file of rows, and $LOGS, a directory. `limit` is in seconds."""

    name: str
    command: str
    limit: float = 300
    gpus: int = 1
    ray: bool = False


def ppo(
    name: str,
    shape: str,
    prompt: int,
    response: int,
    settings: str,
    both: bool = False,
    gpus: int = 1,
    batch: int = 512,
    tokens: int = 32768,
    steps: int = 4,
    rival: str = "",
) -> Job:
    """PPO steps of this trainer and, with `both`, of verl, to which `rival` is said besides."""
    command = (
        f"{BENCH}step --name {name} --shape {shape} --prompt {prompt} --response {response} --batch {batch} "
        f"--gpus {gpus} --out $ROWS --logs $LOGS --timeout 700"
    )
    line = f"{command} --side ours --tokens {tokens} --steps {steps} {settings}"
    if both:
        line += f"; {command} --side verl --steps 3 {rival}"
    return Job(name, line, limit=1200 if both else 300, gpus=gpus, ray=True)


def grpo(
    shape: str,
    batch: int,
    prompt: int,
    response: int,
    mean: int,
    side: str,
    settings: str = "",
    tokens: int = 16384,
    suffix: str = "",
) -> Job:
    """GRPO steps with 8 responses to a prompt. Each side is a job of its own, because each takes minutes."""
    name = f"grpo-{shape}-{response}"
    command = (
        f"{BENCH}step --algorithm grpo --samples 8 --name {name} --shape {shape} --prompt {prompt} "
        f"--response {response} --batch {batch} --side {side} --tokens {tokens} {f'--mean {mean} ' if mean else ''}"
        f"--steps {4 if side == 'ours' else 3} "
        f"--out $ROWS --logs $LOGS --timeout 560 {settings}"
    )
    return Job(f"{name}-{side}{suffix}", command, limit=580, ray=side != "trl")


def conversations(kind: str) -> str:
    """A thousand conversations of four turns, of 500 tokens on average, whose tools take up to 30 s."""
    return (
        f"{sys.executable} -m benchmarks.conversations {kind} --device cuda --shape 0.5B --time-scale 0.5 --prompt 512 "
        "--turn 500 --answer 200 --limit 8192 --max-num-seqs 512 --kv-cache-gib 40 --out $ROWS"
    )


def long_tail(
    name: str,
    settings: str,
    steps: int,
    gpus: int = 1,
    limit: int = 300,
    side: str = "ours",
    lengths: str = "--response 8192 --mean 2500",
) -> Job:
    """GRPO steps whose longest responses, of 8,192 tokens, are four times as long as the average."""
    command = (
        f"{BENCH}step --algorithm grpo --samples 8 --name {name} --shape 0.5B --prompt 128 {lengths} --batch 32 "
        f"--side {side} --tokens 32768 --steps {steps} --gpus {gpus} --out $ROWS --logs $LOGS "
        f"--timeout {limit - 60} {settings}"
    )
    return Job(name, command, limit=limit, gpus=gpus, ray=True)


def replayed(name: str, shape: str, settings: str) -> Job:
    """Two PPO steps in a fixed order, and the same again."""
    command = (
        f"{BENCH}step --name {name} --shape {shape} --prompt 256 --response 256 --batch 128 --tokens 8192 --side ours "
        f"--steps 2 --out $ROWS --logs $LOGS --timeout 300 trainer.save_freq=2 trainer.deterministic=true {settings} "
        f"&& {sys.executable} -m trainer replay $LOGS/runs/gpu-*"
    )
    return Job(name, command, limit=580, ray=True)


TWO_ENGINES = "rollout.engines_per_gpu=2"
# Log-probs of each step are compared with the engines'; steps are large, so that adapters matter after few of them.
ADAPTERS = "actor.lora.rank=32 actor.learning_rate=2e-4 rollout.compare_freq=1"
# No log-probs from the engines, and the GiB of their cache.
CACHE = "rollout.compare_freq=0 rollout.kv_cache_gib={}"
# The first GPU trains, the second samples.
LEARNER_AND_ENGINE = (
    "device_mapping.actor=0 device_mapping.critic=0 device_mapping.reference=0 device_mapping.rollout=1"
)
SPLIT = f"{LEARNER_AND_ENGINE} rollout.sleep=false rollout.kv_cache_gib=12 algorithm.correction=tis"
IN_FLIGHT = "trainer.mode=asynchronous rollout.segment_length=256 rollout.sleep=false"
# The longest responses take as long as four steps, or as twelve.
AHEAD = f"{IN_FLIGHT} algorithm.old_log_probs=engine trainer.max_staleness={{}}"
LOG_NORMAL = "--response 16384 --log-normal 1000 1.5"
AWAKE = "rollout.sleep=false rollout.kv_cache_gib=24 algorithm.correction=tis"
# What optimizers keep leaves the GPU between their steps.
OFFLOAD = "actor.sharding.optimizer_offload=true critic.sharding.optimizer_offload=true"
# Large micro-batches in little memory; small ones would be bound by Python in a model as small as 0.5B.
CHECKPOINTS = "actor.activation_checkpointing=true critic.activation_checkpointing=true"
# Of a model as small as 0.5B each rank has room for a copy, and for all gradients throughout an update.
COPIES = " ".join(
    f"{role}.sharding.{setting}"
    for role in ("actor", "critic")
    for setting in ("shard_size=1", "resharding_interval=16", "gradient_sync_interval=16")
)
PLAN = (
    # The longest first; those with verl take ten to fifteen minutes, of which it needs four to start.
    ppo("1.5B-256-1024", "1.5B", 256, 1024, CACHE.format(20), both=True, tokens=16384, steps=3),
    ppo("0.5B-256-1024", "0.5B", 256, 1024, CACHE.format(10), both=True),
    ppo("1.5B-512-512", "1.5B", 512, 512, CACHE.format(16), both=True, tokens=16384, steps=3),
    ppo("0.5B-512-512", "0.5B", 512, 512, CACHE.format(8), both=True),
    ppo("0.5B-256-512", "0.5B", 256, 512, CACHE.format(8), both=True, rival="--rival-keeps"),
    ppo("1.5B-256-512-two-gpus", "1.5B", 256, 512, CACHE.format(16), both=True, tokens=16384, gpus=2),
    ppo("0.5B-256-512-defaults", "0.5B", 256, 512, "", tokens=0),
    # With verl's memory as the measure.
    ppo("1.5B-256-1024-offload", "1.5B", 256, 1024, f"{CACHE.format(20)} {OFFLOAD}", tokens=12288, steps=3),
    ppo("1.5B-512-512-offload", "1.5B", 512, 512, f"{CACHE.format(16)} {OFFLOAD}", tokens=12288, steps=3),
    ppo("0.5B-256-1024-offload", "0.5B", 256, 1024, f"{CACHE.format(10)} {OFFLOAD} {CHECKPOINTS}", tokens=24576),
    ppo("0.5B-512-512-offload", "0.5B", 512, 512, f"{CACHE.format(8)} {OFFLOAD} {CHECKPOINTS}", tokens=24576),
    *(
        job
        for side in ("ours", "verl")
        for job in (
            grpo("0.5B", 64, 128, 2048, 500, side, "rollout.compare_freq=0", tokens=32768),
            grpo("1.5B", 64, 512, 2048, 500, side, "rollout.compare_freq=0"),
            grpo("1.5B", 16, 256, 4096, 0, side, "rollout.compare_freq=0"),
        )
    ),
    grpo("0.5B", 64, 128, 2048, 500, "ours", f"{TWO_ENGINES} {CACHE.format(7)}", tokens=32768, suffix="-two-engines"),
    grpo("1.5B", 64, 512, 2048, 500, "ours", "rollout.compare_freq=0 actor.backend=exact", suffix="-exact"),
    grpo("1.5B", 64, 512, 2048, 500, "ours", tokens=0, suffix="-defaults"),
    # Jobs for which no setting was tuned: many short responses, and adapters.
    grpo("1.5B", 256, 200, 128, 110, "ours", tokens=0, suffix="-short"),
    grpo("1.5B", 256, 200, 128, 110, "verl", suffix="-short"),
    *(
        grpo("7B", 16, 256, 1024, 0, "ours", f"{ADAPTERS} rollout.lora={lora}", tokens=0, suffix=f"-{lora}")
        for lora in ("adapters", "merged")
    ),
    # Large models on one GPU, with defaults alone.
    grpo("7B", 16, 256, 1024, 0, "ours", tokens=0, suffix="-defaults"),
    grpo("14B", 16, 256, 1024, 0, "ours", ADAPTERS, tokens=0, suffix="-defaults"),
    # Rows of 32k tokens, most of them prompt, so that generation is short.
    *(
        grpo("1.5B", 4, 30720, 1024, 0, side, "--samples 4", tokens=0, suffix="-long-prompts")
        for side in ("ours", "verl")
    ),
    Job(
        "rollout-7B",
        f"{BENCH}rollout --shape 7B --prompts 16 --samples 8 --prompt 256 --response 1024 --engines 1 --repeats 2 "
        "--kv-cache-gib 12 --out $ROWS",
    ),
    Job(
        "rollout-short",
        f"{BENCH}rollout --shape 1.5B --prompts 256 --samples 8 --prompt 200 --response 128 --mean 110 --engines 1 "
        "--kv-cache-gib 12 --out $ROWS",
    ),
    Job(
        "rollout-classification",
        f"{BENCH}rollout --shape 1.5B --prompts 512 --samples 4 --prompt 1000 --response 32 --mean 20 --engines 1 "
        "--kv-cache-gib 24 --out $ROWS",
    ),
    grpo("0.5B", 64, 128, 2048, 500, "trl", "--rival-keeps"),
    grpo("1.5B", 64, 512, 2048, 500, "trl"),
    # TRL's memory guide keeps activations where there is room: that needs an H200.
    grpo("1.5B", 64, 512, 2048, 500, "trl", "--rival-keeps", suffix="-keeps"),
    Job(
        "rollout-1.5B-4096",
        f"{BENCH}rollout --shape 1.5B --prompts 16 --samples 8 --prompt 256 --response 4096 --engines 1 --repeats 1 "
        "--kv-cache-gib 20 --out $ROWS --profile $LOGS",
    ),
    long_tail("long-tail-synchronous", AWAKE, steps=4),
    long_tail("long-tail-asynchronous", f"{IN_FLIGHT} trainer.max_staleness=2 {AWAKE}", steps=7),
    long_tail("long-tail-two-gpus", f"{LEARNER_AND_ENGINE} {AHEAD.format(4)}", steps=16, gpus=2, limit=480),
    long_tail("long-tail-two-gpus-synchronous", "rollout.compare_freq=0", steps=4, gpus=2),
    long_tail("long-tail-two-gpus-verl", "--rival-keeps", steps=16, gpus=2, limit=590, side="verl-asynchronous"),
    long_tail(
        "log-normal-two-gpus",
        f"{LEARNER_AND_ENGINE} {AHEAD.format(12)}",
        steps=40,
        gpus=2,
        limit=1000,
        lengths=LOG_NORMAL,
    ),
    long_tail(
        "log-normal-two-gpus-synchronous", "rollout.compare_freq=0", steps=4, gpus=2, limit=400, lengths=LOG_NORMAL
    ),
    # Activations of 32,768 tokens would not fit beside the optimizer in 80 GB. The first step ends after ten minutes.
    long_tail(
        "log-normal-two-gpus-verl",
        "--rival-keeps --rival-tokens 24576 --rival-ahead 12",
        steps=40,
        gpus=2,
        limit=1500,
        side="verl-asynchronous",
        lengths=LOG_NORMAL,
    ),
    replayed("fixed-order", "0.5B", ""),
    replayed("fixed-order-exact", "1.5B", "actor.backend=exact"),
    Job("drafts", f"{BENCH}drafts --shape 1.5B --out $ROWS", limit=400),
    Job("conversations-tools", conversations("tools"), limit=500),
    Job("conversations-programs", conversations("programs --bad 0.1"), limit=500),
    Job(
        "train-1.5B", f"{BENCH}train_step --shape 1.5B --tokens 8192 24576 --budgets 0.9 1 --out $ROWS --profile $LOGS"
    ),
    Job(
        "train-0.5B", f"{BENCH}train_step --shape 0.5B --tokens 8192 32768 --budgets 0.9 1 --out $ROWS --profile $LOGS"
    ),
    Job("tests", f"{sys.executable} -m pytest tests/gpu -q", limit=600),
    Job("rollout-0.5B", f"{BENCH}rollout --shape 0.5B --engines 4 --out $ROWS --profile $LOGS"),
    Job("rollout-1.5B", f"{BENCH}rollout --shape 1.5B --engines 2 --out $ROWS"),
    *(Job(f"accounting-{shape}", f"{BENCH}accounting --shape {shape} --out $ROWS") for shape in ("0.5B", "1.5B")),
    Job("start-up", f"{BENCH}start_up --shape 0.5B --out $ROWS --logs $LOGS {CACHE.format(8)}", limit=590),
    Job("tensor-parallel-7B", f"{BENCH}tensor_parallel --shape 7B --out $ROWS", limit=420, gpus=2, ray=True),
    Job("context-7B", f"{BENCH}context --shape 7B --tokens 65536 --parallel 1 2 4 --out $ROWS", limit=600),
    Job("context-1.5B", f"{BENCH}context --shape 1.5B --tokens 32768 --parallel 1 2 4 --out $ROWS", limit=600),
    # As many layers as fit with AdamW's states, and all of them with activations computed again.
    Job(
        "experts-30B",
        f"{BENCH}experts --shape moe-30B --layers 6 --parallel 1 2 8 --optimizer --micro-batches 4 "
        "--compiled true false --out $ROWS",
        limit=600,
    ),
    Job(
        "experts-30B-deep",
        f"{BENCH}experts --shape moe-30B --layers 48 --parallel 8 --checkpointing true false --out $ROWS",
        limit=600,
    ),
    Job(
        "experts-30B-parts",
        f"{BENCH}experts --shape moe-30B --layers 4 --parallel 1 8 --parts $LOGS --out $ROWS",
        limit=600,
    ),
    *(grpo("moe-3B", 16, 256, 1024, 0, side, tokens=0 if side == "ours" else 16384) for side in ("ours", "verl")),
    Job("weights", f"{BENCH}weights --out $ROWS", ray=True),
    Job("weights-split", f"{BENCH}weights --split --out $ROWS", gpus=2, ray=True),
    ppo("split-synchronous", "0.5B", 256, 512, SPLIT, gpus=2),
    ppo("split-one-step-off", "0.5B", 256, 512, f"{SPLIT} trainer.mode=one_step_off", gpus=2, steps=5),
    ppo("scaling-1", "0.5B", 256, 512, CACHE.format(8)),
    ppo("scaling-2", "0.5B", 256, 512, f"{CACHE.format(8)} {COPIES}", gpus=2, batch=1024),
    ppo("scaling-4", "0.5B", 256, 512, f"{CACHE.format(8)} {COPIES}", gpus=4, batch=2048),
    ppo("7B-256-512", "7B", 256, 512, "rollout.compare_freq=0 rollout.kv_cache_gib=10", both=True, gpus=4, tokens=8192),
)


class Host:
    """The GPUs of a host, assigned to jobs as they become free."""

    def __init__(self, out: Path, gpus: int, within: float = float("inf")) -> None:
        self._out = out
        self._within = within
        self._free = set(range(gpus))
        self._cores = max(1, (os.cpu_count() or 1) // gpus)
        self._freed = threading.Condition()
        self._began = time.monotonic()

    def run(self, jobs: list[Job]) -> None:
        """Starts each job as soon as enough GPUs are free, in this order. Returns when all have ended.

        Leaves out the jobs whose limits do not fit into the time that is left.
        """
        threads, left = [], list(jobs)
        while left:
            with self._freed:
                passed = time.monotonic() - self._began
                for late in [job for job in left if passed + job.limit > self._within]:
                    self._say(f"{late.name}: left out, it may take {late.limit:.0f} s")
                    left.remove(late)
                job = next((job for job in left if job.gpus <= len(self._free)), None)
                if job is None:
                    if left:
                        self._freed.wait()
                    continue
                left.remove(job)
                taken = sorted(self._free)[: job.gpus]
                self._free.difference_update(taken)
            threads.append(threading.Thread(target=self._run, args=(job, taken)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _run(self, job: Job, gpus: list[int]) -> None:
        cores = [core for gpu in gpus for core in range(gpu * self._cores, (gpu + 1) * self._cores)]
        script = PRELUDE
        if job.ray:
            script += RAY.format(python=sys.executable, cpus=len(cores), gpus=len(gpus), name=job.name)
        isolated = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), "bash", "-c", script + job.command]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "ROWS": str(self._out / f"{job.name}.jsonl"),
            "LOGS": str(self._out / f"{job.name}-logs"),
        }
        self._say(f"{job.name} starts on {gpus}")
        started = time.monotonic()
        with (self._out / f"{job.name}.log").open("w") as log:
            process = subprocess.Popen(
                [*isolated, *pinned], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                end = f"exit {process.wait(job.limit)}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                end = "cut short"
        self._say(f"{job.name}: {end}, {time.monotonic() - started:.0f} s")
        with self._freed:
            self._free.update(gpus)
            self._freed.notify_all()

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/gpu-session"))
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[job.name for job in PLAN])
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS", help="for all jobs together")
    parser.add_argument("--gpus", type=int, help="of this host; all if not given")
    parser.add_argument("--list", action="store_true", help="show the jobs and what each runs")
    options = parser.parse_args()
    named = {job.name: job for job in PLAN}
    jobs = [named[name] for name in dict.fromkeys(options.only or named)]
    if options.list:
        for job in jobs:
            print(f"{job.name}  ({job.gpus} GPUs, {job.limit:.0f} s)\n    {job.command}")  # noqa: T201
        return
    gpus = options.gpus
    if gpus is None:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
        gpus = len(listed.stdout.splitlines())
    if unfit := [job.name for job in jobs if job.gpus > gpus]:
        parser.error(f"this host has {gpus} GPUs, too few for {shlex.join(unfit)}: leave them out with --only")
    options.out.mkdir(parents=True, exist_ok=True)
    Host(options.out.absolute(), gpus, options.within).run(jobs)


if __name__ == "__main__":
    main()
