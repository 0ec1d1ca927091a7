"""How the actor's weights get to the engines."""

from trainer.cluster import WorkerGroup


def sync_weights(actor: WorkerGroup, rollout: WorkerGroup, on_shared_gpus: bool) -> None:
    """Gives every engine the actor's weights; each engine sums up what it got and compares.

    Where every engine shares its GPU with an actor rank, it copies from it there (CUDA IPC); elsewhere the weights
    travel through Ray's object store. Raises EngineError if they do not arrive.
    """
    if not on_shared_gpus:
        rollout.call("replace_weights", actor.call("publish_weights")[0])
        return
    shared = actor.call("share_weights")
    engines_per_rank = len(rollout) // len(actor)
    rollout.call_each("copy_weights", [(shared[engine // engines_per_rank],) for engine in range(len(rollout))])
    actor.call("release_weights")
