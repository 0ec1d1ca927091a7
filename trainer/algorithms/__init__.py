"""Formulas as pure functions of tensors, each with its shapes and its paper. Knows nothing of the settings."""
