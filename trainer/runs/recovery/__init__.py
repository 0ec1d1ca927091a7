"""How a run goes on after lost ranks, full memory or a policy that went wrong."""
