"""The data sets that `trainer data` writes: one row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.data.published import conversion, synthetic
from trainer.data.published.conversion import Parts

TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class Split:
    """Files of a repository of the hub that hold a split, as a pattern, and the column of each part of a row."""

    hub: str
    files: str
    columns: Mapping[str, str]
    data_source: str


@dataclass(frozen=True)
class PublishedDataset:
    """A data set with a training and a test split.

    `convert` turns the parts of a row into columns of a file; `synthesize` makes the parts of COUNT different rows from
    a seed. `rule` is the reward rule that scores them; empty if none does.
    """

    name: str
    title: str
    splits: Mapping[str, Split]
    convert: Callable[[Parts], dict[str, Any]]
    synthesize: Callable[[int, int], list[Parts]]
    rule: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a row."""
        return tuple(self.splits[TRAIN].columns)

    @property
    def synthetic_source(self) -> str:
        """The data source of rows that were made up."""
        return f"slipway/synthetic-{self.name}"


def _splits(hub: str, files: str, columns: Mapping[str, str]) -> dict[str, Split]:
    """Both splits of a repository whose files have their names."""
    return {split: Split(hub, files.format(split=split), columns, hub) for split in (TRAIN, TEST)}


_ROWS = (
    PublishedDataset(
        name="gsm8k",
        title="GSM8K, grade-school word problems",
        splits=_splits("openai/gsm8k", "main/{split}-*.parquet", {"question": "question", "answer": "answer"}),
        convert=conversion.gsm8k,
        synthesize=synthetic.sums,
        rule="gsm8k",
    ),
    PublishedDataset(
        name="math",
        title="MATH, competition problems with boxed answers",
        splits=_splits(
            "DigitalLearningGmbH/MATH-lighteval",
            "data/{split}-*.parquet",
            {"question": "problem", "answer": "solution"},
        ),
        convert=conversion.math,
        synthesize=synthetic.boxed_results,
        rule="math",
    ),
    PublishedDataset(
        name="dapo",
        title="DAPO-Math-17k without its repeated rows, tested on AIME 2024",
        splits={
            TRAIN: Split(
                "open-r1/DAPO-Math-17k-Processed",
                "all/train-*.parquet",
                {"question": "prompt", "answer": "solution"},
                "math_dapo",
            ),
            TEST: Split(
                "HuggingFaceH4/aime_2024",
                "data/train-*.parquet",
                {"question": "problem", "answer": "answer"},
                "aime_2024",
            ),
        },
        convert=conversion.dapo,
        synthesize=synthetic.results,
        rule="dapo",
    ),
    PublishedDataset(
        name="code",
        title="DeepCoder's programs with tests: TACO, tested on Codeforces",
        splits={
            TRAIN: Split(
                "agentica-org/DeepCoder-Preview-Dataset",
                "taco/train-*.parquet",
                {"question": "problem", "tests": "tests"},
                "taco",
            ),
            TEST: Split(
                "agentica-org/DeepCoder-Preview-Dataset",
                "codeforces/test-*.parquet",
                {"question": "problem", "tests": "tests"},
                "codeforces",
            ),
        },
        convert=conversion.code,
        synthesize=synthetic.programs,
        rule="code",
    ),
    PublishedDataset(
        name="preferences",
        title="UltraFeedback's preference pairs, whose prompts a reward model can score as well",
        splits=_splits(
            "HuggingFaceH4/ultrafeedback_binarized",
            "data/{split}_prefs-*.parquet",
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        ),
        convert=conversion.preference,
        synthesize=synthetic.pairs,
    ),
)
DATASETS = {row.name: row for row in _ROWS}
