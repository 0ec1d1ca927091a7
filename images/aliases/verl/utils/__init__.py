"""The modules of verl that other code imports."""
