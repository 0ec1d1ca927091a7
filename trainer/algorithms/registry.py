"""The rows of the folders below by name. Each row is one file."""

from trainer.algorithms.rows import Correction, Estimator, PolicyLoss, PreferenceLoss, UnpairedLoss
from trainer.rows import find_rows

ESTIMATORS = find_rows("trainer.algorithms.advantages", Estimator)
POLICY_LOSSES = find_rows("trainer.algorithms.policy_losses", PolicyLoss)
PREFERENCE_LOSSES = find_rows("trainer.algorithms.preference_losses", PreferenceLoss)
UNPAIRED_LOSSES = find_rows("trainer.algorithms.unpaired_losses", UnpairedLoss)
CORRECTIONS = find_rows("trainer.algorithms.corrections", Correction)
