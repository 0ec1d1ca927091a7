"""Recipes of examples/recipes, run on CPU with a tiny model, synthetic rows of their data and short responses: every
other setting is as written."""

from pathlib import Path

import pytest

from tests.trainer.whole_run import ROOT, Runs
from trainer.data.published.origins import Synthetic
from trainer.data.published.table import DATASETS
from trainer.data.published.writing import write_dataset

RECIPES = ROOT / "examples" / "recipes"
SMALL = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 384,
    "data.max_response_length": 32,
    "actor.micro_batch_tokens": 1024,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 0,
    "trainer.total_steps": 2,
    "trainer.save_freq": 0,
}


@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        pytest.param("gsm8k_lora_1gpu", "gsm8k", marks=pytest.mark.full),
        ("math_gspo_7b_8gpu", "math"),
        ("dpo_pairs_8gpu", "preferences"),
    ],
)
def test_a_recipe_trains(runs: Runs, tmp_path: Path, recipe: str, data: str) -> None:
    settings = {**SMALL, "model.path": runs.model, "trainer.output_dir": runs.directory}
    train, held_out = write_dataset(DATASETS[data], Synthetic(32), tmp_path)
    command = "dpo" if recipe.startswith("dpo") else "train"
    if command == "train":
        settings |= {"rollout.samples_per_prompt": 2, "rollout.engine": "transformers", "actor.mini_batch_size": 4}
    settings |= {"data.train_files": train, "data.validation_files": held_out}
    run = runs.launch(command, recipe, settings, "--config", str(RECIPES / f"{recipe}.yaml"))
    run.succeed()
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    assert (run.directory / "model" / "config.json").is_file()
