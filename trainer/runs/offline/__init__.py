"""Runs that learn from files of responses, without sampling or rewards."""
