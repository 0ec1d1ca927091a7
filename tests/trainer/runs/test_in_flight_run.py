"""A whole asynchronous run whose responses stay in flight while the weights change, and its continuation."""

from tests.trainer.whole_run import Runs


def test_responses_stay_in_flight_while_weights_change_and_a_resumed_run_continues_them(runs: Runs) -> None:
    """Weights go from the actor to the engine, as between GPUs; other asynchronous tests use the object store."""
    settings = (
        "trainer.nnodes=1",
        "trainer.mode=asynchronous",
        "rollout.engine=vllm",
        "rollout.segment_length=4",
        "rollout.weight_transfer=broadcast",
        "data.max_response_length=96",
        "algorithm.correction=tis",
        "trainer.max_staleness=2",
        "trainer.total_steps=4",
        "trainer.save_freq=2",
    )
    run = runs.start("in-flight", *settings)
    said = run.succeed()
    assert "responses continue under new weights and keep their KV cache" in said
    assert "weights go to the engines through gloo" in said
    rows = run.metrics()[1:]
    assert len(rows) == 4
    assert 0 < max(row["rollout/staleness_max"] for row in rows) <= 2
    assert all(row["actor/gradient_norm"] > 0 for row in rows)
    assert all(row["rollout/repairs"] == 0 for row in rows)
    checkpoint = run.directory / "checkpoints" / "step_000002"
    assert (checkpoint / "sampled_ahead.safetensors").is_file()
    resumed = runs.start("in-flight-resumed", *settings, f"trainer.resume={checkpoint}")
    resumed.succeed()
    again = resumed.metrics()
    assert [row["step"] for row in again] == [3, 4]
    assert 0 < again[0]["rollout/staleness_max"] <= 2  # it learned from responses of older weights
