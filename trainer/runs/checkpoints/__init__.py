"""What a run writes to go on from, and what it finds again."""
