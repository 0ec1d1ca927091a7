"""PPO's formulas as pure functions of tensors; one file each, with its shapes and its paper."""
