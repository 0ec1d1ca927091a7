"""Agent programs: they talk to the policy through an OpenAI-compatible endpoint."""
