"""Formulas as pure functions of tensors, each with its shapes and its paper. Independent of the settings."""
