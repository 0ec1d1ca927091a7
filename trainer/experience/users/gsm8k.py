"""Says whether the answer to a problem of GSM8K is right, until it is."""

from typing import Any

from trainer.experience.user import Interaction, UserRow
from trainer.rewards.rules.gsm8k import gsm8k

_RIGHT = "Your response is correct!"
_WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class AnswerJudge(Interaction):
    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        del instance_id
        said = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        score = gsm8k(said, kwargs.get("ground_truth"))
        return score == 1.0, _RIGHT if score == 1.0 else _WRONG, score, {}


ROW = UserRow(name="gsm8k", user=AnswerJudge, verl=("verl.interactions.gsm8k_interaction.Gsm8kInteraction",))
