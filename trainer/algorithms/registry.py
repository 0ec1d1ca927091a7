"""Every advantage estimator, policy loss and correction by name. Each is one file in the folders below."""

from trainer.algorithms.rows import Correction, Estimator, PolicyLoss
from trainer.rows import find_rows

ESTIMATORS = find_rows("trainer.algorithms.advantages", Estimator)
POLICY_LOSSES = find_rows("trainer.algorithms.policy_losses", PolicyLoss)
CORRECTIONS = find_rows("trainer.algorithms.corrections", Correction)
