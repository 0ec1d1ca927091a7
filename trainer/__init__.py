"""PPO on Ray, vLLM and torch."""
