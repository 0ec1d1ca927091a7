"""The rollout engine behind one adapter."""
