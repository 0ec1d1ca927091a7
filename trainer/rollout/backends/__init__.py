"""The rollout engines: one module each, named as `rollout.engine` names it, with its `ROW`."""
