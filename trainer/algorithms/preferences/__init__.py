"""Learning from preferences: DPO, KTO, and what their losses share."""
