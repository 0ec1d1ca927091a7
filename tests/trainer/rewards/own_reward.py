"""A reward function of a user."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    return float(solution_str == ground_truth)
