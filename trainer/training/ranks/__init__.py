"""How ranks meet, share a network among them, and read and write their parts of it."""
