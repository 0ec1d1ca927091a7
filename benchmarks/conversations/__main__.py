"""A thousand conversations whose tools take from 0.1 to 60 s: how busy the engine stays, and what it reads twice.

    python -m benchmarks.conversations tools
    python -m benchmarks.conversations programs --bad 0.1

The controller's own code (`Conversations`, with tools or with programs at the endpoint), and the trainer's vLLM engine
in a process of its own. The policy is random: its turns have random lengths, and every turn counts as a call of the
tool. Durations of tools are log-normal with a median of 2 s, clipped, and then multiplied by `--time-scale`. With
`--bad`, that share of the tools or programs raises, hangs, or returns nonsense. On a GPU: `--device cuda --shape 0.5B`.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.conversations.agents import LONGEST, PROGRAM, TOOLS, TURNS, always_calls, made_prompts
from benchmarks.conversations.engine import SEEDS, open_engine
from benchmarks.conversations.figures import Watch, busy, outcome, prefilled, resident_mib, retokenised
from benchmarks.gpu.common import SHAPES, Results, arguments, write_job
from benchmarks.gpu.lengths import geometric
from trainer.config.tree import Config
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.formats import hermes
from trainer.experience.programs.host import ProgramAgent
from trainer.models.files import load_tokenizer
from trainer.rollout.sampling import SamplingRequest


def settings(options: argparse.Namespace) -> Config:
    rollout: dict[str, Any] = {
        "max_turns": TURNS,
        "max_num_seqs": options.max_num_seqs,
        "sleep": False,
        "environment_calls": options.answering,
        "segment_length": options.segment,
        "environment_timeout": LONGEST * options.time_scale + 30,
        "kv_cache_gib": options.kv_cache_gib,
    }
    data: dict[str, Any] = {"max_prompt_length": options.prompt + 64, "max_response_length": options.limit}
    if options.kind == "tools":
        data["tools_file"] = options.job / "tools.yaml"
        data["tools_file"].write_text(TOOLS)
        rollout["agent"] = "tools"
    else:
        program = options.job / "agent.py"
        program.write_text(PROGRAM)
        rollout["agent"] = "program"
        # -S: starts without site-packages, because this measures the trainer and not Python.
        command = [sys.executable, "-I", "-S", str(program)]
        rollout["program"] = {"command": command, "processes": options.answering}
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    tree = {"model": {"path": options.job / "model", "dtype": dtype}, "rollout": rollout, "data": data}
    return Config.model_validate(tree)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = settings(options)
    tokenizer = load_tokenizer(config.model)
    prompts = made_prompts(options, tokenizer)
    with open_engine(config, options.device) as recorder:
        recorder.generate([SamplingRequest((300,), 1.0, max_tokens=8)])  # compiles, allocates
        recorder.calls.clear(), recorder.asked.clear()
        conversations = Conversations(config, recorder, tokenizer)  # type: ignore[arg-type]
        memory = resident_mib()
        begin = time.monotonic()
        rows = conversations.begin(prompts, [number * SEEDS for number in range(len(prompts))], temperature=1.0)
        with Watch(rows) as watch:
            conversations.finish(rows)
        conversations.close()
    end = watch.end
    in_calls = sum(call.end - call.begin for call in recorder.calls)
    tools = [sum(prompt.extra_info["seconds"]) for prompt in prompts if not prompt.extra_info["bad"]]
    good = [row for row, prompt in zip(rows, prompts, strict=True) if not prompt.extra_info["bad"]]
    agents = [row.environment for row in rows if isinstance(row.environment, ProgramAgent)]
    return {
        "kind": options.kind,
        "conversations": len(rows),
        "time_scale": options.time_scale,
        "seconds": round(end - begin, 1),
        "engine_seconds": round(in_calls, 1),
        "longest_tools": round(max(tools), 1),
        "tool_seconds": round(sum(tools)),
        "done_90": round(watch.when(0.9) - begin, 1),
        "done_99": round(watch.when(0.99) - begin, 1),
        "busy": busy(recorder.calls, begin, end),
        "busy_to_90": busy(recorder.calls, begin, watch.when(0.9)),
        "busy_to_99": busy(recorder.calls, begin, watch.when(0.99)),
        "busy_8_to_90": busy(recorder.calls, begin, watch.when(0.9), least=8),
        "sampled_tokens": sum(len(row.sampled) for row in rows),
        "retokenised_tokens": retokenised(rows, recorder),
        "prompt_tokens": prefilled(recorder),
        "block": recorder.block,
        "requests": len(recorder.asked),
        "engine_calls": len(recorder.calls),
        "memory_growth_mib": round(watch.memory - memory),
        "threads": watch.threads,
        "good": dict(Counter(map(outcome, good))),
        "all": dict(Counter(map(outcome, rows))),
        "failed_programs": sum(agent.failed for agent in agents),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("kind", choices=["tools", "programs"])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--bad", type=float, default=0.0, help="share of tools or programs that fail")
    parser.add_argument("--answering", type=int, default=1000, help="tools or programs at once")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompt", type=int, default=160, help="tokens of a prompt")
    parser.add_argument("--turn", type=int, default=40, help="mean tokens of a turn")
    parser.add_argument("--answer", type=int, default=80, help="tokens of a tool's answer")
    parser.add_argument("--limit", type=int, default=1600, help="tokens after the prompt")
    parser.add_argument("--segment", type=int, default=64, help="rollout.segment_length")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    options = parser.parse_args()
    name = f"conversations-{options.shape}-{options.turn}"
    options.job = write_job(options.jobs / name, options.shape, 64, prompts=4, means=geometric(options.turn))
    hermes.ROW = hermes.CallFormat(name="hermes", parse=always_calls, opening="<tool_call>")
    Results(options.out, "conversations").add(**measure(options))


if __name__ == "__main__":
    main()
