"""Scoring responses: rules, custom functions and reward models."""
