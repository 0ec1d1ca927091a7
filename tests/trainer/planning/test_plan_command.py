"""`trainer plan`, which needs neither a cluster nor GPUs."""

from pathlib import Path

import pytest

from trainer.cli import main


def plan(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    return int(ended.value.code or 0)


def test_it_shows_choices_with_reasons_and_each_rank(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"model.path={model}", "data.max_prompt_length=128", "data.max_response_length=256"]
    assert plan(*settings, "--nodes", "2", "--gpus", "4", "--gpu-gib", "80") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("chosen: actor.micro_batch_tokens=32768: ") for line in lines)
    assert any(line.startswith("chosen: rollout.kv_cache_gib=") and "all " in line for line in lines)
    actors = [line.split() for line in lines if line.startswith("actor")]
    assert [row[1:4] for row in actors] == [[f"node{rank // 4}", "cuda", str(rank)] for rank in range(8)]


def test_it_shows_the_memory_of_copies(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"model.path={model}", "data.max_prompt_length=128", "data.max_response_length=256"]
    assert plan(*settings, "trainer.redundancy=1", "--nodes", "2", "--gpus", "4", "--gpu-gib", "80") == 0
    assert "copies in the memory of each node: " in capsys.readouterr().out


def test_a_plan_that_does_not_fit_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"model.path={model}", "data.max_prompt_length=128", "data.max_response_length=256",
                "rollout.kv_cache_gib=100", "--gpus", "1", "--gpu-gib", "80") == 2  # fmt: skip
    said = capsys.readouterr().err
    assert "cuda 0 of node0 has 80.0 GiB, 26.2 less than the 106.2 that are needed" in said


def test_gpus_of_unknown_size_are_asked_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"model.path={model}", "data.max_prompt_length=128", "data.max_response_length=256", "--gpus", "8") == 2
    assert "--gpu-gib" in capsys.readouterr().err
