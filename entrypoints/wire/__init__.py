"""How nodes find, reach and trust each other."""
