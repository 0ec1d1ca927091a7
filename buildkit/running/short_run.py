"""A short training run of an image on this machine, for `certify` and `warm`: the image, its GPUs here, the command."""

from buildkit.errors import RunError, UsageError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.host.machine import Machine
from buildkit.recipe.matrix import Variant
from buildkit.running.engine import ContainerEngine

STEPS = 3

# A small model of random weights learns for some steps: the log-probs of a new one are so equal that wrong weights
# would hardly show.
PREPARE = (
    "python3 -m trainer data arithmetic --output data --train 64 --validation 8",
    "python3 -m trainer sft train_files=data/demonstrations.parquet validation_files=data/validation.parquet"
    " output=model steps=40 test_freq=40",
)
# Large learning rates, so that an engine that missed an update is far from the actor.
SETTINGS = (
    "model.path=model",
    "data.train_files=data/train.parquet",
    "data.validation_files=data/validation.parquet",
    "data.max_prompt_length=128",
    "data.max_response_length=32",
    "data.train_batch_size=8",
    "rollout.samples_per_prompt=2",
    "rollout.kv_cache_gib=0.1",
    "rollout.max_num_seqs=32",
    "rollout.compare_freq=1",
    "actor.learning_rate=3e-3",
    "actor.mini_batch_size=8",
    "actor.entropy_coefficient=0.1",
    "critic.learning_rate=1e-2",
    "critic.mini_batch_size=8",
    "trainer.output_dir=runs",
    "trainer.run_id=ppo",
    f"trainer.total_steps={STEPS}",
    "trainer.test_freq=-1",
    "trainer.save_freq=0",
)


def short_run(folder: str, ranks: int, on_gpus: bool, limit: int) -> tuple[str, ...]:
    """`launch`'s arguments for PPO of a small model in `folder`, for at most `limit` seconds.

    On GPUs the ranks share a node; on CPU each node is a rank.
    """
    where = f"trainer.n_gpus_per_node={ranks}" if on_gpus else f"trainer.nnodes={ranks}"
    train = " ".join(("exec python3 -m trainer train", *SETTINGS, where))
    return ("--", "timeout", str(limit), "sh", "-ec", "\n".join((f"cd {folder}", *PREPARE, train)))


def labels_of(engine: ContainerEngine, image: str, variant: Variant) -> dict[str, str]:
    """The labels of a local image of this variant that can train. Raises `UsageError` for any other."""
    local = engine.find(image)
    if local is None:
        raise UsageError(f"there is no image {image}", f"run `buildkit build --target {variant.target}`")
    refuse_other_variant(local.labels, variant, image)
    if not variant.trains:
        raise UsageError(f"{variant.identifier} cannot train", "name a variant that has torch: `buildkit targets`")
    return local.labels


def refuse_other_variant(labels: dict[str, str], variant: Variant, image: str) -> None:
    labelled = (labels.get("dev.slipway.target"), labels.get("dev.slipway.variant"))
    if labelled != (variant.target, variant.name) or "dev.slipway.lock" not in labels:
        raise UsageError(
            f"{image} is no image of {variant.identifier}: its labels say {labelled[0]}, {labelled[1]}",
            "name its --target and --variant, or another --image",
        )


def count_gpus(machine: Machine, variant: Variant, command: str) -> int:
    """The GPUs that the image can use here; 0 for a target without GPUs. `command` asks. Raises `RunError`."""
    accelerator = ACCELERATORS[variant.target]
    count = machine.gpus[variant.target].count
    if accelerator.has_gpus and not count:
        raise RunError(
            f"this machine has no {accelerator.vendor} GPU, so it cannot {command} {variant.identifier}",
            f"run it on a machine with one; `buildkit {command} --target cpu` rehearses it without",
        )
    return count
