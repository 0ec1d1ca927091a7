"""FSDP's state after a forward or backward pass that an exception has ended."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from trainer.training.ranks.sharding import sharded_modules


def discard_pass(network: FSDPModule) -> None:
    """Drops the gathered weights and the gradients of the pass, so that the next one starts clean.

    Only for a network of a single rank: other ranks would wait in a collective of the pass.
    """
    states = [module._get_fsdp_state() for module in sharded_modules(network)]
    if hasattr(network, "reset_iter_state"):
        network.reset_iter_state()
    elif states[0]._is_root is not None:  # a pass has begun
        _reset(states)
    # What earlier micro-batches added up: torch keeps it where ranks do not yet exchange it.
    for state in states:
        for weight in state._fsdp_param_group.fsdp_params if state._fsdp_param_group else ():
            weight.unsharded_accumulated_grad = None
            if hasattr(weight, "_unsharded_param"):
                weight._unsharded_param.grad = None


def _reset(states: list[Any]) -> None:
    """`reset_iter_state` for torch before 2.13, which lacks it. The first state is that of the whole network."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    root = states[0]
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for state in states:
        state._training_state = idle
        group = state._fsdp_param_group
        if group is None:
            continue
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
