"""From prompts to scored trajectories: sampling, conversations with environments, and work done ahead."""
