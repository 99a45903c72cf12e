# SPDX-License-Identifier: Apache-2.0
"""Which tensors a Hugging Face checkpoint folder holds, and whether an update matches them.

An engine update must name exactly the tensors of the checkpoint that the engine loaded. A missing
or misspelt expert is otherwise skipped in silence by the engine, which keeps its old weights.
Only headers are read, so this costs milliseconds even for a large model.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import EngineConfigError, WeightNamesError

if TYPE_CHECKING:
    import torch

# The types of the safetensors format, by the names that torch has for them.
SAFETENSORS_DTYPES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_TORCH_NAMES: Mapping[str, str] = {word: name for name, word in SAFETENSORS_DTYPES.items()}
# Of the scales of a weight in block FP8, behind the weight's own name.
SCALE_SUFFIX = "_scale_inv"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 30
_NAMES_SHOWN = 4


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type, in the words of the safetensors format ("F32", "BF16", ...), and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float8(self) -> bool:
        return self.dtype.startswith("F8_")

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The type as torch has it."""
        import torch

        dtype: torch.dtype = getattr(torch, _TORCH_NAMES[self.dtype])
        return dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @classmethod
    def of(cls, tensor: "torch.Tensor") -> "TensorInfo":
        """Type and shape of a tensor."""
        name = str(tensor.dtype).removeprefix("torch.")
        word = SAFETENSORS_DTYPES.get(name)
        if word is None:
            raise WeightNamesError(f"weights of type {name} cannot be sent to an engine")
        return cls(word, tuple(tensor.shape))


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors of a checkpoint folder; an update may leave out the optional ones."""

    tensors: Mapping[str, TensorInfo]
    optional: frozenset[str]
    vocab_size: int


def read_checkpoint_index(folder: str | Path) -> CheckpointIndex:
    """Read names, types and shapes of all weights in `folder`.

    Raises EngineConfigError when the folder cannot be served: it does not exist, has no
    config.json, or has no weights.
    """
    path = Path(folder)
    config_path = path / "config.json"
    if not os.path.isfile(config_path):  # Path.is_file raises for a name that is too long
        raise EngineConfigError(
            f"no model at {path}: expected a folder with config.json and *.safetensors. "
            "Set the model path to a Hugging Face checkpoint folder"
        )
    config = _read_json(config_path)
    tensors: dict[str, TensorInfo] = {}
    for file in _weight_files(path):
        if file.suffix == ".safetensors":
            found = read_safetensors_header(file)
        else:
            found = _read_torch_header(file)
        twice = tensors.keys() & found.keys()
        if twice:
            raise EngineConfigError(f"{path} holds {some_names(twice)} in two files; keep one")
        tensors.update(found)
    text_config = config.get("text_config") or config
    vocab_size = text_config.get("vocab_size") if isinstance(text_config, dict) else None
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise EngineConfigError(f"{config_path} has no vocab_size; got {vocab_size!r}")
    return CheckpointIndex(tensors, _optional_names(tensors, config), vocab_size)


def read_safetensors_header(file: str | Path) -> dict[str, TensorInfo]:
    """Names, types and shapes in one safetensors file, without reading its data."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise EngineConfigError(f"{file} is no safetensors file (header of {size} bytes)")
        try:
            header: dict[str, Any] = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            return {
                name: TensorInfo(str(entry["dtype"]), tuple(map(int, entry["shape"])))
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise EngineConfigError(
                f"{file} is no safetensors file (its header is not one of tensors)"
            ) from None


def check_names(names: Iterable[str], index: CheckpointIndex, *, complete: bool = True) -> None:
    """Raise WeightNamesError on unknown and, with `complete`, missing or repeated names."""
    listed = list(names)
    given = set(listed)
    unknown = [name for name in given if name not in index.tensors]
    if unknown:
        raise WeightNamesError(
            f"{len(unknown)} tensor(s) of the update are not in the engine's checkpoint: "
            f"{some_names(unknown)}. Use the checkpoint's own names; nothing was loaded"
        )
    if len(given) != len(listed):
        twice = [name for name, count in Counter(listed).items() if count > 1]
        raise WeightNamesError(
            f"{some_names(twice)} occurs twice in the update; every tensor is sent exactly once. "
            "Nothing was loaded"
        )
    if not complete:
        return
    missing = [n for n in index.tensors if n not in given and n not in index.optional]
    if missing:
        raise WeightNamesError(
            f"{len(missing)} of the checkpoint's {len(index.tensors)} tensors are missing from "
            f"the update: {some_names(missing)}. An update replaces all weights; nothing was loaded"
        )


def check_update_names(
    update: Mapping[str, TensorInfo], index: CheckpointIndex, *, complete: bool = True
) -> None:
    """Raise WeightNamesError unless `update` replaces the checkpoint's tensors exactly.

    Unknown names, wrong shapes, a float8 tensor where the checkpoint has none (or the reverse:
    the engine would cast in silence) and, with `complete`, missing names are refused.
    """
    check_names(update, index, complete=complete)
    for name, info in update.items():
        expected = index.tensors[name]
        if info.shape != expected.shape:
            raise WeightNamesError(
                f"{name} has shape {list(info.shape)}, the checkpoint has "
                f"{list(expected.shape)}; nothing was loaded"
            )
        if info.is_float8 != expected.is_float8:
            raise WeightNamesError(
                f"{name} is {info.dtype}, the checkpoint has {expected.dtype}: send float8 "
                "weights (and their scales) exactly where the engine's checkpoint has them; "
                "nothing was loaded"
            )


def _weight_files(path: Path) -> list[Path]:
    """The files that an engine would load: those of an index if there is one, else all."""
    for suffix, index_name in (
        (".safetensors", "model.safetensors.index.json"),
        (".bin", "pytorch_model.bin.index.json"),
    ):
        index = path / index_name
        if index.is_file():
            names = _names_of_index(index)
            absent = [name for name in names if not os.path.isfile(path / name)]
            if absent:
                raise EngineConfigError(
                    f"{path} lacks {some_names(absent)}, which {index_name} lists: the download or "
                    "export is incomplete"
                )
            return [path / name for name in names]
        # "consolidated" files repeat the weights in another naming; training_args.bin and the
        # like are no weights.
        files = [
            file
            for file in sorted(path.glob(f"*{suffix}"))
            if not file.name.startswith(("consolidated", "training_args", "optimizer"))
        ]
        if files:
            return files
    raise EngineConfigError(
        f"{path} has no weights: expected *.safetensors or *.bin beside config.json, found "
        f"{some_names(sorted(os.listdir(path))) or 'nothing'}. Download or export the weights first"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise EngineConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _names_of_index(path: Path) -> list[str]:
    """The weight files that an index lists; they lie beside it."""
    weight_map = _read_json(path).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise EngineConfigError(
            f"{path}: expected a weight_map from names of tensors to files beside it"
        )
    return sorted(set(names))


def _read_torch_header(file: Path) -> dict[str, TensorInfo]:
    import torch  # only for old checkpoints; a safetensors folder needs no torch here

    state = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    return {name: TensorInfo.of(tensor) for name, tensor in state.items()}


def _optional_names(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> frozenset[str]:
    """Tensors that the engine derives or ignores, though some checkpoints store them."""
    optional = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.get("tie_word_embeddings") and "lm_head.weight" in tensors:
        optional.add("lm_head.weight")
    return frozenset(optional)


def some_names(names: Any) -> str:
    """The first few names, and how many more there are."""
    listed = sorted(names)
    more = len(listed) - _NAMES_SHOWN
    return ", ".join(listed[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
