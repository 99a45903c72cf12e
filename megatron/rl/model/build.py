# SPDX-License-Identifier: Apache-2.0
"""Build the Megatron-Core model of a Hugging Face architecture."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron.rl import cpu_backend
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture
from megatron.rl.model.cpu_modules import CPUSpecProvider
from megatron.rl.model.fp8 import FP8Settings, check_transformer_options, transformer_fields
from megatron.rl.model.fp8_emulation import BlockwiseRecipe, emulated_recipe
from megatron.rl.model.fp8_requirements import require_transformer_engine
from megatron.rl.parallel import ParallelConfig
from megatron.rl.weights.names import Naming

# Set by this module from the model, the layout or the loss contract; a user who sets one of them
# under megatron.transformer would break what relies on it.
RESERVED_TRANSFORMER_FIELDS = frozenset(
    {
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "kv_channels", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size",
        "normalization", "layernorm_epsilon", "gated_linear_unit", "activation_func",
        "add_bias_linear", "add_qkv_bias", "qk_layernorm", "hidden_dropout", "attention_dropout",
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
        "virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "overlap_p2p_comm", "batch_p2p_comm",
        "calculate_per_token_loss", "variable_seq_lengths", "params_dtype", "pipeline_dtype",
        "bf16", "fp16", "use_cpu_initialization", "perform_initialization",
        "mtp_num_layers", "defer_embedding_wgrad_compute",
    }
)  # fmt: skip


@dataclass(frozen=True)
class BuildOptions:
    """What is not in the architecture: precision and any other field of ``TransformerConfig``."""

    dtype: torch.dtype = torch.float32
    transformer: dict[str, Any] = field(default_factory=dict)
    fp8: FP8Settings = field(default_factory=FP8Settings)


def transformer_config(
    model: Architecture, layout: ParallelConfig, options: BuildOptions
) -> TransformerConfig:
    """Return Megatron's config of the model in this layout.

    Raises:
        UserError: an unknown or reserved field in ``options.transformer``, or a value that
            Megatron refuses.
    """
    known = {f.name for f in fields(TransformerConfig)}
    for name in options.transformer:
        if name not in known:
            raise UserError(f"megatron.transformer.{name}: TransformerConfig has no such field")
        if name in RESERVED_TRANSFORMER_FIELDS:
            raise UserError(
                f"megatron.transformer.{name} is set from the model, the layout or the loss; "
                "remove it"
            )
    on_cpu = cpu_backend.is_installed()
    check_transformer_options(options.transformer, options.fp8, emulated=on_cpu)
    settings = _architecture_fields(model) | _layout_fields(layout, options)
    if not on_cpu:
        settings |= transformer_fields(options.fp8, is_moe=model.is_moe)
    settings |= options.transformer
    try:
        return TransformerConfig(**settings)
    except (ValueError, AssertionError) as error:
        raise UserError(f"megatron-core refuses this model and layout: {error}") from error


def _architecture_fields(model: Architecture) -> dict[str, Any]:
    settings: dict[str, Any] = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    if model.is_moe:
        settings |= dict(
            num_moe_experts=model.num_experts,
            moe_router_topk=model.experts_per_token,
            moe_ffn_hidden_size=model.moe_ffn_hidden_size,
            moe_router_pre_softmax=False,  # softmax after top-k equals norm_topk_prob
            moe_router_dtype="fp32",
            # Their gradients would bypass the mask and be scaled by other token counts.
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_z_loss_coeff=None,
        )
    return settings


def _layout_fields(layout: ParallelConfig, options: BuildOptions) -> dict[str, Any]:
    on_cpu = cpu_backend.is_installed()
    settings: dict[str, Any] = dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        # The contract of the loss: sums and an int count; finalize_model_grads divides once.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,  # packed micro-batches differ in length...
        moe_token_dispatcher_type="alltoall",  # ...which only this dispatcher allows
        perform_initialization=False,  # weights come from a checkpoint
        use_cpu_initialization=on_cpu,
    )
    if layout.virtual is not None:
        # Batched, both directions would meet in one call, and between two stages the order of its
        # messages would mix them up (megatron/training/arguments.py:966-975).
        settings |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    if on_cpu:
        settings |= dict(
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            moe_grouped_gemm=False,
            moe_permute_fusion=False,
            attention_backend=AttnBackend.local,
        )
    else:
        settings |= dict(apply_rope_fusion=True, moe_grouped_gemm=True, persist_layer_norm=True)
    return settings


def parameter_naming() -> Naming:
    """Return whose names the model's parameters have: the layers are :func:`layer_spec`'s."""
    return "local" if cpu_backend.is_installed() else "transformer_engine"


def layer_spec(
    config: TransformerConfig, vp_stage: int | None, fp8: FP8Settings | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage: local modules on CPU, Transformer Engine on GPU.

    Args:
        fp8: what CPU layers emulate; those of Transformer Engine are told by ``config``.
    """
    if not cpu_backend.is_installed():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    fp8 = fp8 or FP8Settings()
    recipe = emulated_recipe(fp8) if fp8.enabled else None
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[
            _cpu_layer(config, recipe if fp8.quantizes_layer(layer, config.num_layers) else None)
            for layer in layers
        ],
        layer_norm=CPUSpecProvider().layer_norm(rms_norm=True),
    )


def _cpu_layer(config: TransformerConfig, fp8: BlockwiseRecipe | None) -> ModuleSpec:
    backend = CPUSpecProvider(fp8)
    norm = backend.layer_norm(rms_norm=True)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm if config.qk_layernorm else None,
            k_layernorm=norm if config.qk_layernorm else None,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend, num_experts=config.num_moe_experts),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def build_model(
    model: Architecture, layout: ParallelConfig, options: BuildOptions
) -> list[GPTModel]:
    """Return this rank's part of the model, weights not yet loaded.

    One chunk of layers, or ``layout.virtual`` of them in the order of the layers. The process
    groups must exist (:func:`megatron.rl.parallel.build_groups`).

    Raises:
        UserError: as :func:`transformer_config`, or FP8 that this machine does not have.
    """
    if not cpu_backend.is_installed():
        require_transformer_engine(options.fp8)
    config = transformer_config(model, layout, options)
    return [
        _build_chunk(model, layout, config, layer_spec(config, vp_stage, options.fp8), vp_stage)
        for vp_stage in ([None] if layout.virtual is None else range(layout.virtual))
    ]


def _build_chunk(
    model: Architecture,
    layout: ParallelConfig,
    config: TransformerConfig,
    layers: TransformerBlockSubmodules,
    vp_stage: int | None,
) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=layout.padded_vocab_size(model.vocab_size),
        max_sequence_length=model.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        vp_stage=vp_stage,
    )
