"""Speculative decoding: an engine guesses tokens and verifies several of them in one step."""
