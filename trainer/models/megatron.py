"""Replaces the layers of a Transformers model by Megatron-Core's transformer layers (package megatron-core).

The embedding, rotary angles, final normalisation and head remain Transformers'. Megatron computes each layer's
normalisations, attention projections and MLP, whose matrices can be split over ranks. The attention itself is
`trainer.models.attention`, because Megatron's needs padded rows or GPUs.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.func import functional_call
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trainer.errors import ConfigError
from trainer.models.attention import context_attention
from trainer.models.megatron_weights import Origins, origins, to_megatron
from trainer.models.packing import ATTENTION_ARGUMENTS
from trainer.models.tensor_parallel import check_split

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Apex")  # whose kernels are for GPUs
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
    from megatron.core.utils import make_viewless_tensor

# Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1, which would keep FSDP2's collectives from overlapping with layers.
warnings.filterwarnings("ignore", message="When using async grad allreduce")


@dataclass(frozen=True)
class PackedLine:
    """Rotary angles of a packed line and who sees whom, passed in place of Megatron's attention mask."""

    rotation: tuple[Tensor, Tensor]  # cosines and sines, each [1, tokens, head width]
    sight: dict[str, Any]  # ATTENTION_ARGUMENTS and the context group


class PackedCore(nn.Module):  # type: ignore[misc]
    """Applies rotary embeddings and attends within each sequence of a packed line."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.scaling: float | None = None
        self.sliding_window: int | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, line: PackedLine, **_: Any) -> Tensor:
        """query [tokens, 1, heads, width]; key, value [tokens, 1, key-value heads, width] -> [tokens, 1, all width]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *line.rotation)
        attended = context_attention(
            self,
            query,
            key,
            value,
            attention_mask=None,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **line.sight,
        )[0]
        return attended.transpose(0, 1).flatten(2)


class MegatronLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """A Megatron layer with the call signature of a Transformers layer.

    Weights split over a group of ranks are distributed tensors, which FSDP2, the optimizer and checkpoints understand.
    The layer computes with this rank's part of each.
    """

    def __init__(
        self,
        original: nn.Module,
        config: TransformerConfig,
        table: Origins,
        mesh: DeviceMesh | None,
        group: dist.ProcessGroup,
    ) -> None:
        """Takes the weights of `original`, a Transformers layer. Raises ConfigError if their names do not match."""
        super().__init__()
        attention = original.self_attn
        with torch.device("meta"):
            self.megatron = TransformerLayer(
                config,
                _modules(with_head_norms=hasattr(attention, "q_norm")),
                pg_collection=ProcessGroupCollection(tp=group, cp=None, pp=None),
            )
        core = self.megatron.self_attention.core_attention
        core.scaling = attention.scaling
        # Mistral keeps it in the configuration only.
        core.sliding_window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        trained = next(original.parameters()).requires_grad
        weights = to_megatron({name: weight.detach() for name, weight in original.named_parameters()}, table)
        self._check_names(weights)
        for name, (weight, split) in weights.items():
            if split is not None and mesh is not None:
                # Every rank has read the same weights, so none are sent.
                weight = distribute_tensor(weight, mesh, [Split(split)], src_data_rank=None)
            module, _, kind = name.rpartition(".")
            setattr(self.megatron.get_submodule(module), kind, nn.Parameter(weight, requires_grad=trained))

    def _check_names(self, weights: Iterable[str]) -> None:
        names = {name for name, _ in self.megatron.named_parameters()}
        if unlike := names.symmetric_difference(weights):
            raise ConfigError(
                f"backend=megatron: this model's layers differ from Megatron's in {', '.join(sorted(unlike))}",
                hint="set backend=fsdp, or use a model with layers like those of Qwen2, Qwen3, Llama and Mistral",
            )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **arguments: Any,
    ) -> Tensor:
        """hidden_states [1, tokens, width] -> the same. `arguments` include those of the attention."""
        sight = {name: arguments[name] for name in (*ATTENTION_ARGUMENTS, "context_group")}
        line = PackedLine(position_embeddings, sight)
        local = {n: weight.to_local() for n, weight in self.megatron.named_parameters() if isinstance(weight, DTensor)}
        output, _ = functional_call(self.megatron, local, (hidden_states.transpose(0, 1),), {"attention_mask": line})
        # FSDP2 puts a hook on the output, which must not be a view.
        return make_viewless_tensor(output.transpose(0, 1), requires_grad=output.requires_grad, keep_graph=True)


def use_megatron_layers(layers: nn.ModuleList, config: Any, mesh: DeviceMesh | None) -> None:
    """Replaces a Transformers model's layers in place by Megatron's with the same weights.

    With a mesh, its ranks split the matrices. `config` is the model's. Raises ConfigError if the layers do not fit.
    """
    ranks = 1 if mesh is None else mesh.size()
    if mesh is not None:
        check_split(layers, config, ranks)
        group = mesh.get_group()
    else:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    table = origins(config, ranks)
    settings = _transformer_config(config, ranks, layers[0].self_attn)
    for number, layer in enumerate(layers):
        layers[number] = MegatronLayer(layer, settings, table, mesh, group)


def _transformer_config(config: Any, ranks: int, attention: nn.Module) -> TransformerConfig:
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_width,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=ACT2FN[config.hidden_act],
        add_bias_linear=False,
        add_qkv_bias=attention.q_proj.bias is not None,
        qk_layernorm=hasattr(attention, "q_norm"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,  # the layers are created on `meta`, their weights come from the model
        perform_initialization=False,
        # These GPU kernels need additional packages.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )


def _modules(with_head_norms: bool) -> TransformerLayerSubmodules:
    head_norm = WrappedTorchNorm if with_head_norms else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedCore,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(MLP, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
    )
