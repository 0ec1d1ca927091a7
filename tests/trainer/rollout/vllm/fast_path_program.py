"""A vLLM engine's responses with and without the decode fast path: `fast_path_program.py DIRECTORY`, for
test_fast_path.py. Writes DIRECTORY/results.json.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from trainer.rollout.vllm.settings import engine_environment

os.environ.update(engine_environment(enforce_eager=True), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

import vllm

from tests.trainer.rollout.engine_program import END, make_model
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.engine import open_engine
from trainer.rollout.sampling import SamplingRequest
from trainer.rollout.vllm.decode_run import Tracked


def main(directory: Path) -> None:
    vocabulary = make_model(directory / "model")
    prompts = [tuple((8 + 7 * row + place) % vocabulary for place in range(100)) for row in range(8)]
    requests = [SamplingRequest(prompts[row // 4], 0.9, seed=row, log_probs=row % 3 > 0) for row in range(32)]
    installed = vllm.__version__
    vllm.__version__ = f"{installed.partition('+')[0]}+rocm723"  # as in another build
    engine = opened(directory)
    results: dict[str, Any] = {"notices": engine.notices(), "with": answers(engine, requests)}
    results["fast steps"] = engine.fast_path.steps
    gc.collect()
    gc.disable()
    answers(engine, requests)
    results["kept"] = sum(isinstance(value, Tracked) for value in gc.get_objects())
    gc.enable()
    results["notices with stop strings"] = opened(directory, stop=["#"]).notices()
    vllm.__version__ = "0.99.0"
    engine = opened(directory)
    results["notices of another version"] = engine.notices()
    results["without"] = answers(engine, requests)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    try:
        opened(directory)
    except WorkerError as error:
        results["refused"] = str(error)
    (directory / "results.json").write_text(json.dumps(results))


def opened(directory: Path, **rollout: Any) -> Any:
    config = Config.model_validate(
        {
            "model": {"path": directory / "model"},
            "data": {"max_prompt_length": 100, "max_response_length": 200},
            "rollout": {"kv_cache_gib": 0.1, "max_num_seqs": 16, **rollout},
        }
    )
    return open_engine("vllm", config, "cpu", [END])


def answers(engine: Any, requests: list[SamplingRequest]) -> list[Any]:
    return [(response.token_ids, response.log_probs, response.ended) for response in engine.generate(requests)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
