"""Before a run starts: which role runs where, what memory it takes, and the settings that follow."""
