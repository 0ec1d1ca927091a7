"""Recipes of examples/recipes, run on CPU with a tiny model and short responses: every other setting is as written."""

from pathlib import Path

import pytest

from tests.trainer.pairs import write_preferences
from tests.trainer.whole_run import ROOT, Runs

RECIPES = ROOT / "examples" / "recipes"
SMALL = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 128,
    "data.max_response_length": 32,
    "actor.micro_batch_tokens": 1024,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 0,
    "trainer.total_steps": 2,
    "trainer.save_freq": 0,
}


@pytest.mark.parametrize("recipe", ["gsm8k_lora_1gpu", "math_gspo_7b_8gpu", "dpo_pairs_8gpu"])
def test_a_recipe_trains(runs: Runs, tmp_path: Path, recipe: str) -> None:
    settings = {**SMALL, "model.path": runs.model, "trainer.output_dir": runs.directory}
    command, (train, held_out) = "train", runs.data
    if recipe.startswith("dpo"):
        command, (train, held_out) = "dpo", write_preferences(tmp_path, 8, 4, max_number=9, seed=0)
    else:
        settings |= {"rollout.samples_per_prompt": 2, "rollout.engine": "transformers", "actor.mini_batch_size": 4}
    settings |= {"data.train_files": train, "data.validation_files": held_out}
    run = runs.launch(command, recipe, settings, "--config", str(RECIPES / f"{recipe}.yaml"))
    run.succeed()
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    assert (run.directory / "model" / "config.json").is_file()
