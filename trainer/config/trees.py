"""The settings of every command."""

from collections.abc import Mapping

from pydantic import BaseModel

from trainer.config.dpo import DpoConfig
from trainer.config.kto import KtoConfig
from trainer.config.sft import SftConfig
from trainer.config.tree import Config
from trainer.config.warm_start import WarmStartConfig

TREES: Mapping[str, type[BaseModel]] = {
    "`python -m trainer train`": Config,
    "`python -m trainer dpo`": DpoConfig,
    "`python -m trainer kto`": KtoConfig,
    "`python -m trainer sft`": SftConfig,
    "`python -m trainer sft` without `model.path`": WarmStartConfig,
}
"""By command."""
