"""One job from start to end: the nodes meet, form Ray, run the command and end together."""
