"""Plans a run before it starts: placement of roles, memory, and the settings that follow."""
