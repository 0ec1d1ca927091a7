"""Tools that start jobs on anybody's machines: their own clusters, or several clouds."""
