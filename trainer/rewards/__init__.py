"""Scores for responses: rules, custom functions and reward models."""
