# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoint folders: reading tensors lazily, and writing one."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.rl.errors import UserError
from megatron.rl.weights.joins import Rectangle
from megatron.rl.weights.names import Shape

MAX_SHARD_BYTES = 4 * 1024**3
INDEX_NAME = "model.safetensors.index.json"


class HFTensors:
    """The tensors of a checkpoint folder, by name, read from disk when asked for.

    Use as a context manager.

    Raises:
        UserError: the folder holds no ``*.safetensors`` file, a damaged one, or a tensor in two of
            them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise UserError(
                f"model.path: expected weights in *.safetensors files, found none in {self.folder}"
            )
        self._files: list[Any] = []
        self._owner: dict[str, Any] = {}
        for path in paths:
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"model.path: {path} is not a whole *.safetensors file: {error}; fetch it again"
                ) from None
            self._files.append(handle)
            if twice := self._owner.keys() & handle.keys():
                raise UserError(
                    f"model.path: {min(twice)} is in two of the *.safetensors files in "
                    f"{self.folder}; remove those that are not part of the model"
                )
            self._owner |= dict.fromkeys(handle.keys(), handle)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor; reads none of them."""
        return {
            name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._owner.items()
        }

    def read(self, name: str) -> Tensor:
        return self._owner[name].get_tensor(name)

    def read_part(self, name: str, part: Rectangle) -> Tensor:
        """Read a rectangle of a tensor of 1 or 2 dimensions; no byte of the rest is read."""
        stored = self._owner[name].get_slice(name)
        return stored[part.index(len(stored.get_shape()))]

    def __enter__(self) -> "HFTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owner.clear()
        self._files.clear()


def write_checkpoint(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    copy_from: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a Hugging Face checkpoint, in shards of at most 4 GiB.

    Everything but the weights (config, tokenizer, templates) is copied from ``copy_from``. The
    folder appears at once: it is written beside its place and renamed.

    Args:
        config: what config.json says instead; None: what it says in ``copy_from``.
    """
    folder, copy_from = Path(folder), Path(copy_from)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_other_files(copy_from, partial)
    if config is not None:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    try:
        _name_shards(partial, _write_shards(partial, tensors))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy what a checkpoint has beside its weights, unless the folder has a file of that name."""
    for path in source.iterdir():
        weights = "safetensors" in path.name or path.suffix in (".bin", ".pt")
        if path.is_file() and not weights and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, int]]:
    """Write numbered shard files; return the size in bytes of each tensor, shard by shard."""
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append({name: t.numel() * t.element_size() for name, t in pending.items()})
            pending.clear()

    size = 0
    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        size += tensor.numel() * tensor.element_size()
        if size > MAX_SHARD_BYTES and pending:
            flush()
            size = tensor.numel() * tensor.element_size()
        pending[name] = tensor
    flush()
    return shards


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """Give the shard files the names that Hugging Face loaders expect."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / final)
        weight_map |= dict.fromkeys(shard, final)
    index = {
        "metadata": {"total_size": sum(sum(shard.values()) for shard in shards)},
        "weight_map": weight_map,
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
