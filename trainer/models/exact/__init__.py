"""Layers of the operators of vLLM's engine, for log-probs that equal the engines' to the bit."""
