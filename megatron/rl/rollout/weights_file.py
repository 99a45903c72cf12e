# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to the engine: one safetensors file that nobody can leak.

The file has no name on disk: it lives as long as someone holds it open, so a killed trainer
leaves no gigabytes behind in /dev/shm. The engine opens it as /proc/<trainer>/fd/<n>, as often as
it needs (each tensor-parallel worker reads for itself, and a restarted engine reads it again).
"""

import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from .checkpoint_index import CheckpointIndex, TensorInfo, check_update_names
from .errors import EngineError, WeightNamesError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY_FOLDER = "/dev/shm"
# Room that must stay free beside the weights, so that they do not take the last page.
_SPARE_BYTES = 64 << 20
_GIB = float(1 << 30)

SAFETENSORS_DTYPES: Mapping[str, str] = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


@dataclass(frozen=True)
class WeightsFile:
    """A finished weights file. `path` is valid while this process lives and has not closed it."""

    stream: IO[bytes]
    path: str
    folder: str
    num_tensors: int
    num_bytes: int

    def close(self) -> None:
        """Give the memory back.

        Truncating first frees it even when a forked child (a data loader, a reward worker)
        happened to inherit the open file.
        """
        if not self.stream.closed:
            self.stream.truncate(0)
            self.stream.close()


def write_weights(
    tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
    index: CheckpointIndex,
) -> WeightsFile:
    """Stream tensors into a weights file, checking that they are exactly the checkpoint's.

    One tensor is held at a time, so an iterator may gather each from its ranks just in time.
    Raises WeightNamesError on unknown, duplicate, missing or misshapen tensors; the iterator is
    not read further than the first offence.
    """
    pairs = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    first = next(pairs, None)
    if first is not None:
        pairs = itertools.chain((first,), pairs)
    folder = _choose_folder(_estimate_bytes(index, first))
    stream: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix="rollout-weights-")  # noqa: SIM115
    try:
        header_bytes = _header_bound(index)
        written: dict[str, TensorInfo] = {}
        entries: dict[str, Any] = {}
        start = 0
        stream.seek(8 + header_bytes)
        for name, tensor in pairs:
            if name in written:
                raise WeightNamesError(
                    f"{name} occurs twice in the update; every tensor is sent exactly once. "
                    "Nothing was loaded"
                )
            written[name] = _describe(name, tensor)
            check_update_names({name: written[name]}, index, complete=False)
            data = _raw_bytes(tensor)
            stream.write(data)
            entries[name] = {
                "dtype": written[name].dtype,
                "shape": list(written[name].shape),
                "data_offsets": [start, start + data.nbytes],
            }
            start += data.nbytes
        check_update_names(written, index)
        # The format allows trailing spaces; the header's true size is known only now.
        header = json.dumps(entries, separators=(",", ":")).encode().ljust(header_bytes)
        assert len(header) == header_bytes, "the header's upper bound was too small"
        stream.seek(0)
        stream.write(header_bytes.to_bytes(8, "little") + header)
        stream.flush()
    except OSError as error:
        stream.close()
        raise EngineError(
            f"could not write the weights for the engine to {folder} ({error}). Free some room "
            "there, or set TMPDIR to a larger disk"
        ) from error
    except BaseException:
        stream.close()
        raise
    path = f"/proc/{os.getpid()}/fd/{stream.fileno()}"
    return WeightsFile(stream, path, folder, len(written), start)


def _describe(name: str, tensor: "torch.Tensor") -> TensorInfo:
    dtype = SAFETENSORS_DTYPES.get(str(tensor.dtype))
    if dtype is None:
        raise WeightNamesError(f"{name} has type {tensor.dtype}, which a weights file cannot hold")
    return TensorInfo(dtype, tuple(tensor.shape))


def _raw_bytes(tensor: "torch.Tensor") -> memoryview:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _header_bound(index: CheckpointIndex) -> int:
    """An upper bound of the header's size: types are not known before the tensors arrive."""
    fixed = 80 + 2 * 20  # keys, quotes, the longest type name, and two offsets of 20 digits
    bound = 2
    for name, info in index.tensors.items():
        bound += len(json.dumps(name)) + fixed + len(json.dumps(list(info.shape)))
    return (bound + 7) // 8 * 8


def _estimate_bytes(index: CheckpointIndex, first: "tuple[str, torch.Tensor] | None") -> int:
    """Size of the update: the checkpoint's, scaled when the first tensor comes in a wider type."""
    total = sum(math.prod(t.shape) * _element_bytes(t.dtype) for t in index.tensors.values())
    if first is not None and first[0] in index.tensors:
        total *= max(1, first[1].element_size() // _element_bytes(index.tensors[first[0]].dtype))
    return total


def _element_bytes(dtype: str) -> int:
    """Bytes per element of a safetensors type: the first number in its name, in bits, or 8."""
    digits = re.search(r"[0-9]+", dtype)
    return int(digits.group()) // 8 if digits else 1


def _choose_folder(need_bytes: int) -> str:
    """Memory when there is room for it, else the temporary folder, else an error."""
    need = need_bytes + _SPARE_BYTES
    temporary = tempfile.gettempdir()
    free: dict[str, int] = {}
    for folder in (SHARED_MEMORY_FOLDER, temporary):
        if not os.access(folder, os.W_OK):
            continue
        free[folder] = shutil.disk_usage(folder).free
        if folder == SHARED_MEMORY_FOLDER:
            # A memory file system promises more than there is.
            free[folder] = min(free[folder], _available_memory_bytes())
        if free[folder] >= need:
            return folder
    seen = ", ".join(f"{folder} {amount / _GIB:.1f} GiB" for folder, amount in free.items())
    raise EngineError(
        f"no room for the weights on their way to the engine: {need / _GIB:.1f} GiB needed, free: "
        f"{seen}. Enlarge {SHARED_MEMORY_FOLDER} (docker: --shm-size) or set TMPDIR to a larger "
        "disk"
    )


def _available_memory_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
