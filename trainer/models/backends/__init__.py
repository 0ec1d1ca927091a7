"""The training backends: one module each, named as `actor.backend` names it, with its `BACKEND`."""
