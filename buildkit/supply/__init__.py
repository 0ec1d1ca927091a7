"""Where the parts of an image come from: bases, wheels, and their resolution into a lock."""
