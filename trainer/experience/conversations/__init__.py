"""Turns of the policy and what answers them: users' environments, tools, simulated users, agent programs."""
