"""Responses with and without the shortcut through vLLM's accounting: `last_blocks_program.py DIRECTORY`, for
test_last_blocks.py. Whenever the shortcut would be taken, vLLM is asked, too. Writes DIRECTORY/found.json.
"""

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
from trainer.rollout.accounting.last_blocks import LastBlocks
from trainer.rollout.engine import open_engine
from trainer.rollout.sampling import SamplingRequest

BLOCKS = 18  # of 128 tokens on CPU: not all responses fit at once, so vLLM takes some back
PROMPT = 140
LENGTH = 300


class Compared:
    """Asks vLLM every time, and compares what the shortcut says."""

    def __init__(self, cache: Any) -> None:
        self.shortcut, self._cache = LastBlocks(cache), cache
        self._ask_vllm, self._before = cache.allocate_slots, self._books()
        self.asked = self.skipped = self.wrong = self.taken_back = 0

    def _books(self) -> Any:
        (manager,) = self._cache.coordinator.single_type_managers
        blocks = {name: [block.block_id for block in held] for name, held in manager.req_to_blocks.items() if held}
        return blocks, dict(manager.num_cached_block), self._cache.block_pool.get_num_free_blocks()

    def allocate_slots(self, request: Any, num_new_tokens: int, **others: Any) -> Any:
        skipped = num_new_tokens == 1 and others == {"num_lookahead_tokens": 0} and self.shortcut.hold(request)
        before = self._books()
        answer = self._ask_vllm(request, num_new_tokens, **others)
        self.asked, self.skipped = self.asked + 1, self.skipped + skipped
        self.wrong += skipped and (answer is not self._cache.empty_kv_cache_blocks or self._books() != before)
        self.taken_back += answer is None
        return answer


def main(directory: Path) -> None:
    steady_steps.VERSIONS = ()  # else it is hardly ever asked
    vocabulary = make_model(directory / "model")
    found: dict[str, Any] = {}
    for caching in (True, False):
        config = Config.model_validate(
            {
                "model": {"path": directory / "model"},
                "data": {"max_prompt_length": PROMPT, "max_response_length": LENGTH},
                "rollout": {
                    "kv_cache_gib": 0.1,
                    "max_num_seqs": 8,
                    "prefix_caching": caching,
                    "ignore_end_tokens": True,
                },
            }
        )
        engine: Any = open_engine("vllm", config, "cpu", [END])
        cache = engine._scheduler().kv_cache_manager
        keep_only(cache, BLOCKS)
        prompts = [tuple((8 + 7 * row + place) % vocabulary for place in range(PROMPT)) for row in range(8)]
        asked = [SamplingRequest(prompts[row // 2], 0.9, seed=row) for row in range(16)]
        shortened = [response.token_ids for response in engine.generate(asked)]
        changed = type(cache).allocate_slots.__get__(cache) != cache.allocate_slots
        del cache.allocate_slots
        whole = [response.token_ids for response in engine.generate(asked)]
        compared = Compared(cache)
        cache.allocate_slots = compared.allocate_slots
        again = [response.token_ids for response in engine.generate(asked)]
        found[f"prefix_caching={caching}"] = {
            "in place": changed,
            "shortened": shortened,
            "whole": whole,
            "taken back": compared.taken_back,
            "compared": again,
            "asked": compared.asked,
            "skipped": compared.skipped,
            "wrong": compared.wrong,
        }
    (directory / "found.json").write_text(json.dumps(found))


def keep_only(cache: Any, blocks: int) -> None:
    """Takes the other free blocks away."""
    cache.block_pool.get_new_blocks(cache.block_pool.get_num_free_blocks() - blocks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
