"""The user that judges answers to GSM8K."""

from trainer.experience.users.gsm8k import AnswerJudge as Gsm8kInteraction

__all__ = ["Gsm8kInteraction"]
