"""Building images, and what is done with one: plan, reproduce, export, test."""
