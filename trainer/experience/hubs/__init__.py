"""Hubs of environments, one file each. The file defines `ROW`, a `trainer.experience.hub.HubRow`."""
