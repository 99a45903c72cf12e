# SPDX-License-Identifier: Apache-2.0
"""Write a policy for serving: ``pdm-rl export``, in bfloat16, float32 or block FP8.

Tensors pass through one at a time, and the result is written beside its place and renamed, so a
checkpoint of any size is exported in the memory of one shard (4 GiB), and a folder under its final
name is whole. A source that is itself in block FP8 is dequantised on the way.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.rl.errors import UserError
from megatron.rl.plain_files import read_json_object
from megatron.rl.rollout.checkpoint_index import SCALE_SUFFIX
from megatron.rl.weights.block_fp8 import (
    BLOCK,
    QUANTIZED_DTYPE,
    BlockFP8,
    dequantize_weight,
    is_quantized,
    quantization_config,
    quantize_weight,
)
from megatron.rl.weights.hf_files import HFTensors, write_checkpoint

PRECISIONS = {"bf16": torch.bfloat16, "float32": torch.float32}
BLOCK_FP8 = "block_fp8"
MODELOPT_PREFIX = "modelopt:"

PROGRESS_INTERVAL_S = 5.0

# config.json names its precision by one of these, the newer one first.
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class TensorFormat:
    """How the exported tensors are stored."""

    precision: torch.dtype
    """Of every tensor that is not quantised."""

    fp8: BlockFP8 | None = None
    """How projections and experts are quantised; None: they are not."""


@dataclass(frozen=True)
class Exported:
    """What was written; ``notes`` are lines that the user should read."""

    folder: Path
    tensors: int
    nbytes: int
    notes: tuple[str, ...]


def tensor_format(name: str, scales: Literal["power_of_two", "float32"] | None) -> TensorFormat:
    """Read ``--format`` and ``--scales``."""
    if name == BLOCK_FP8:
        return TensorFormat(torch.bfloat16, BlockFP8(scales or "power_of_two"))
    if name not in PRECISIONS:
        raise UserError(
            f"--format: expected bf16, float32, block_fp8 or modelopt:NAME, got {name!r}"
        )
    if scales is not None:
        raise UserError(f"--scales {scales} has no effect with --format {name}; leave it out")
    return TensorFormat(PRECISIONS[name])


def find_checkpoint(source: str | Path) -> Path:
    """Return the checkpoint folder that is meant: ``source``, or the policy of a run folder."""
    source = Path(source)
    if not source.is_dir():
        raise UserError(f"SOURCE: no such folder: {source}")
    for folder in (source / "policy", source):
        if (folder / "config.json").is_file():
            if not any(folder.glob("*.safetensors")):
                raise UserError(f"SOURCE: {folder} has a config.json, but no *.safetensors files")
            return folder
    if (source / "config.yaml").is_file():
        raise UserError(
            f"SOURCE: the run in {source} wrote no policy/: it has not ended, or its config says "
            "run.export: false"
        )
    raise UserError(
        f"SOURCE: expected a run folder or a Hugging Face checkpoint with a config.json, "
        f"found neither in {source}"
    )


def check_destination(out: Path, checkpoint: Path, *, force: bool) -> None:
    """Refuse a place that would cost the user something.

    Only an empty folder, or with ``force`` an earlier checkpoint, is ever replaced.
    """
    if out.resolve() == checkpoint.resolve() or out.resolve() in checkpoint.resolve().parents:
        raise UserError(f"--out: {out} holds the source; name another folder")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "config.json").is_file():
            raise UserError(f"--out: {out} exists and is no checkpoint; name another folder")
        if not force:
            raise UserError(f"--out: {out} exists; name another folder, or replace it with --force")
    elif out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} exists and is not a folder")


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Read config.json."""
    return read_json_object(checkpoint / "config.json")


def export_checkpoint(
    checkpoint: Path, out: Path, fmt: TensorFormat, *, force: bool = False
) -> Exported:
    """Write the checkpoint in another format.

    Args:
        checkpoint: from :func:`find_checkpoint`.
        out: the folder to make.
        fmt: how to store the tensors.
        force: replace a checkpoint that is there.

    Raises:
        UserError: the source cannot be exported so, or ``out`` is taken.
    """
    check_destination(out, checkpoint, force=force)
    config = read_config(checkpoint)
    with HFTensors(checkpoint) as tensors:
        shapes = tensors.shapes()
        names = _weight_names(shapes, config)
        if fmt.fp8 is not None:
            _check_experts(shapes)
        nbytes = 0

        def stored() -> Iterator[tuple[str, Tensor]]:
            nonlocal nbytes
            for name in _with_progress(names):
                for pair in _store(name, _read(tensors, name, shapes), fmt):
                    nbytes += pair[1].nbytes
                    yield pair

        write_checkpoint(
            out, stored(), checkpoint, config=exported_config(config, fmt, names, shapes)
        )
    return Exported(out, len(names), nbytes, _notes(fmt, names, shapes))


def exported_config(
    config: Mapping[str, Any],
    fmt: TensorFormat,
    names: list[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Return config.json for the exported tensors."""
    precision = str(fmt.precision).removeprefix("torch.")
    keys = [key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"]
    exported = dict(config) | dict.fromkeys(keys, precision)
    exported.pop("quantization_config", None)
    if fmt.fp8 is not None:
        kept = [name for name in names if len(shapes[name]) == 2 and not is_quantized(name)]
        modules = [name.removesuffix(".weight") for name in kept]
        # A head that shares the embedding has no tensor, but loaders make a module for it.
        modules += ["lm_head"] if "lm_head" not in modules else []
        exported["quantization_config"] = quantization_config(fmt.fp8, modules)
    return exported


def _weight_names(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors, without scales; refuse a source that is quantised otherwise.

    Numbers in names sort as numbers, so that layers stay together and in order.
    """
    quantization = config.get("quantization_config")
    scales = {name for name in shapes if name.endswith(SCALE_SUFFIX)}
    if quantization is None:
        if scales:
            raise UserError("SOURCE has FP8 scales, but its config.json has no quantization_config")
    elif (
        quantization.get("quant_method") != "fp8"
        or quantization.get("weight_block_size") != [BLOCK, BLOCK]
        or quantization.get("activation_scheme", "dynamic") != "dynamic"
    ):
        raise UserError(
            f"SOURCE is quantised as {quantization.get('quant_method')!r}; only block FP8 with "
            "128 x 128 blocks and dynamic activations can be exported, or a source that is not "
            "quantised"
        )
    orphans = {name for name in scales if name.removesuffix(SCALE_SUFFIX) not in shapes}
    if orphans:
        raise UserError(f"SOURCE has scales without their weight, for example {min(orphans)}")
    return sorted(
        shapes.keys() - scales,
        key=lambda name: [part.zfill(8) if part.isdigit() else part for part in name.split(".")],
    )


def _check_experts(shapes: Mapping[str, tuple[int, ...]]) -> None:
    fused = sorted(name for name, shape in shapes.items() if len(shape) > 2)
    if fused:
        raise UserError(
            f"--format block_fp8 needs one tensor per expert and projection; {fused[0]} has shape "
            f"{list(shapes[fused[0]])}"
        )


def _read(tensors: HFTensors, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Read a tensor; dequantise it (to float32) if it is quantised."""
    tensor = tensors.read(name)
    if name + SCALE_SUFFIX in shapes:
        try:
            return dequantize_weight(tensor, tensors.read(name + SCALE_SUFFIX))
        except ValueError as error:
            raise UserError(f"SOURCE: {name}: {error}") from None
    if tensor.dtype == QUANTIZED_DTYPE:
        raise UserError(f"SOURCE: {name} is in FP8 and has no {SCALE_SUFFIX} tensor")
    return tensor


def _store(name: str, tensor: Tensor, fmt: TensorFormat) -> Iterator[tuple[str, Tensor]]:
    """Yield what the exported checkpoint holds of one tensor."""
    if not tensor.is_floating_point():
        yield name, tensor
    elif fmt.fp8 is None or not is_quantized(name):
        yield name, tensor.to(fmt.precision)
    else:
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            tensor = tensor.float()
        quantized = quantize_weight(tensor, fmt.fp8, name=name)
        yield name, quantized.data
        yield name + SCALE_SUFFIX, quantized.scale_inv


def _notes(
    fmt: TensorFormat, names: list[str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Say what loaders cannot do with the checkpoint.

    vLLM joins q, k, v and gate, up below each other, scales as well, so blocks must end where a
    projection ends; transformers takes a block's sides from the ratio of weight to scales.
    """
    if fmt.fp8 is None:
        return ()
    ragged = [name for name in names if is_quantized(name) and any(n % BLOCK for n in shapes[name])]
    if not ragged:
        return ()
    return (
        f"{len(ragged)} quantised weights have a side that is no multiple of {BLOCK}, for example "
        f"{ragged[0]} {list(shapes[ragged[0]])}; vLLM and transformers may refuse such weights",
    )


def _with_progress(names: list[str]) -> Iterator[str]:
    """Pass names on; say on stderr how far it is, every few seconds of a long export."""
    last = time.monotonic()
    drawn = False
    for i, name in enumerate(names):
        now = time.monotonic()
        if now - last >= PROGRESS_INTERVAL_S:
            last, drawn = now, True
            width = shutil.get_terminal_size().columns - 1
            line = f"exported {i} of {len(names)} tensors"
            end = "\r" if sys.stderr.isatty() else "\n"
            print(line[:width], end=end, file=sys.stderr, flush=True)
        yield name
    if drawn and sys.stderr.isatty():
        print("\x1b[K", end="", file=sys.stderr, flush=True)
