# SPDX-License-Identifier: Apache-2.0
"""Load an exported checkpoint in vLLM, in a process of its own; prints JSON on its last line.

``python -m tests.e2e.export_in_vllm load FOLDER`` gives the folder to vLLM's own model class, and
names the parameters that do not hold what the checkpoint says. Nothing is multiplied, so a CPU
without FP8 instructions will do. ``generate FOLDER TOKENS`` runs an engine: greedy token ids after
a prompt of token ids, and the log-probability of each.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import torch
from safetensors.torch import load_file
from torch import Tensor

NEW_TOKENS = 8
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load(folder: str) -> dict[str, Any]:
    # vLLM picks a matmul kernel while it builds a model, and has one for block FP8 on CPUs with AMX
    # only. The kernel is not run here: it is enough that vLLM believes that it could be.
    torch.cpu._is_amx_tile_supported = lambda: True

    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=64,
        skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    with tempfile.TemporaryDirectory() as rendezvous, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{rendezvous}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(config)
        checkpoint = load_file(Path(folder) / "model.safetensors")
        for parameter in model.parameters():
            parameter.data.flatten().view(torch.uint8).fill_(0x55)  # what is not loaded differs
        model.load_weights(iter(checkpoint.items()))
    parameters = {
        name: parameter.data
        for name, parameter in model.named_parameters()
        if ".attn." not in name  # scales of the KV cache, which checkpoints need not have
    }
    return {
        "method": config.quant_config.get_name(),
        "dtypes": {name: str(tensor.dtype) for name, tensor in parameters.items()},
        "different": [
            name
            for name, tensor in parameters.items()
            if not _same(tensor, _expected(name, checkpoint))
        ],
    }


def _expected(name: str, checkpoint: dict[str, Tensor]) -> Tensor:
    """What vLLM's parameter must hold: the checkpoint's tensors, joined as its layers are."""
    for joined, parts in JOINED.items():
        if joined in name:
            return torch.cat([checkpoint[name.replace(joined, part)] for part in parts])
    stem, routed, leaf = name.partition("routed_experts.")
    if not routed:
        return checkpoint[name]
    which, _, suffix = leaf.partition("_")  # w13_weight_scale_inv
    parts = JOINED["gate_up_proj"] if which == "w13" else ("down_proj",)
    experts = sum(key.startswith(stem) and key.endswith("down_proj.weight") for key in checkpoint)
    return torch.stack(
        [
            torch.cat([checkpoint[f"{stem}{expert}.{part}.{suffix}"] for part in parts])
            for expert in range(experts)
        ]
    )


def _same(parameter: Tensor, expected: Tensor) -> bool:
    held = parameter[: expected.size(0)]  # vLLM pads the vocabulary
    if held.shape != expected.shape or held.dtype != expected.dtype:
        return False
    return torch.equal(held.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def generate(folder: str, prompt: list[int]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(folder, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, seed=0)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, detokenize=False)
    (result,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
    (output,) = result.outputs
    assert output.logprobs is not None
    return {
        "dtype": str(engine.llm_engine.model_config.dtype),
        "tokens": list(output.token_ids),
        "log_probs": [
            row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)
        ],
    }


if __name__ == "__main__":
    command, folder = sys.argv[1:3]
    answer = load(folder) if command == "load" else generate(folder, json.loads(sys.argv[3]))
    print("\n" + json.dumps(answer), flush=True)
