"""This host: its devices, network (`network`) and image, and the environment variables that follow from them."""
