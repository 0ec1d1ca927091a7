"""Reward rules, one file each. The file defines `ROW`, a `trainer.rows.RewardRule`."""
