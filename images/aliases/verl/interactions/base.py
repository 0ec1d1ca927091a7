"""The base class of simulated users."""

from trainer.experience.user import Interaction as BaseInteraction

__all__ = ["BaseInteraction"]
