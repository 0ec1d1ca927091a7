"""A vLLM engine's responses with and without steady steps: `steady_answers_program.py DIRECTORY`, for
test_steady_steps.py. Writes DIRECTORY/found.json.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from trainer.rollout.process_environment import engine_environment

os.environ.update(engine_environment(enforce_eager=True), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

from tests.trainer.rollout.engine_program import END, make_model
from trainer.config.tree import Config
from trainer.rollout.accounting import steady_steps
from trainer.rollout.engine import open_engine
from trainer.rollout.sampling import SamplingRequest


def main(directory: Path) -> None:
    vocabulary = make_model(directory / "model")
    prompts = [tuple((8 + 7 * row + place) % vocabulary for place in range(100)) for row in range(8)]
    asked = [SamplingRequest(prompts[row // 4], 0.9, seed=row, log_probs=row % 3 > 0) for row in range(32)]
    found: dict[str, Any] = {"versions": steady_steps.VERSIONS}
    engine = opened(directory)
    found["with"], found["taken"] = answers(engine, asked), engine._in_flight._steady.taken
    gc.collect()
    gc.disable()
    answers(engine, asked)
    found["kept"] = sum(isinstance(one, steady_steps.Followed) for one in gc.get_objects())
    gc.enable()
    steady_steps.vllm.__version__ += "+rocm723"
    found["against another build"] = steady_steps.reason_against(engine._scheduler())
    found["stop strings"] = opened(directory, stop=["#"])._in_flight._steady
    steady_steps.VERSIONS = ()
    engine = opened(directory)
    found["without"], found["another version"] = answers(engine, asked), engine._in_flight._steady
    (directory / "found.json").write_text(json.dumps(found))


def opened(directory: Path, **rollout: Any) -> Any:
    config = Config.model_validate(
        {
            "model": {"path": directory / "model"},
            "data": {"max_prompt_length": 100, "max_response_length": 200},
            "rollout": {"kv_cache_gib": 0.1, "max_num_seqs": 16, **rollout},
        }
    )
    return open_engine("vllm", config, "cpu", [END])


def answers(engine: Any, asked: list[SamplingRequest]) -> list[Any]:
    return [(response.token_ids, response.log_probs, response.ended) for response in engine.generate(asked)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
