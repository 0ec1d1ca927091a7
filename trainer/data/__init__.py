"""Prompts: made, converted, read and drawn."""
