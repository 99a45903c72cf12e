# SPDX-License-Identifier: Apache-2.0
"""No flipped bit anywhere in a checkpoint goes unnoticed, and nothing in one is trusted."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron.rl.checkpoint.folder import CheckpointFolder
from megatron.rl.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedCheckpoint,
    find_damage,
    read_manifest,
)
from megatron.rl.checkpoint.metadata_file import METADATA_NAME, load_metadata
from tests.unit import checkpoint_files
from tests.unit.checkpoint_files import flip_bit


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = CheckpointFolder(tmp_path_factory.mktemp("run") / "checkpoints")
    return folder.path / str(checkpoint_files.save(folder, 5, score=0.25))


def damage_of(path: Path) -> str | None:
    try:
        return find_damage(path, read_manifest(path))
    except DamagedCheckpoint as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_is_found(checkpoint: Path, data: st.DataObject) -> None:
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    assert MANIFEST_NAME in [path.name for path in paths]
    path = data.draw(st.sampled_from(paths))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    flip_bit(path, position, bit)
    try:
        assert damage_of(checkpoint) is not None
    finally:
        flip_bit(path, position, bit)
    assert damage_of(checkpoint) is None


def test_each_file_is_in_one_share(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert manifest.nbytes == sum(entry.nbytes for entry in manifest.files.values())
    for name in manifest.files:
        flip_bit(checkpoint / name, 0)
        found = [find_damage(checkpoint, manifest, share, 4) for share in range(4)]
        flip_bit(checkpoint / name, 0)
        assert sum(name in damage for damage in found if damage is not None) == 1, found


@pytest.mark.parametrize("fields", [[], {}, {"format": 2}, {"format": 1, "files": {"a": {}}}])
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, fields: object) -> None:
    import hashlib

    text = json.dumps(fields)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / MANIFEST_NAME).write_text(f"{text}\n{digest}\n")
    with pytest.raises(DamagedCheckpoint):
        read_manifest(tmp_path)


class _Opener:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return open, (str(self._path), "w")


def test_an_index_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(_Opener(tmp_path / "opened")))
    with pytest.raises(DamagedCheckpoint, match="open"):
        load_metadata(tmp_path / METADATA_NAME)
    assert not (tmp_path / "opened").exists()
    # The same file does run it where torch reads it.
    pickle.loads((tmp_path / METADATA_NAME).read_bytes()).close()
    assert (tmp_path / "opened").exists()


def test_a_real_index_is_read(tmp_path: Path) -> None:
    state = {"half": torch.zeros(3, dtype=torch.bfloat16), "whole": torch.ones(2, 2)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "out"), no_dist=True)
    metadata = load_metadata(tmp_path / "out" / METADATA_NAME)
    assert metadata.state_dict_metadata["half"].properties.dtype == torch.bfloat16
    assert {index.fqn for index in metadata.storage_data} == {"half", "whole"}
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match="outside"):
        load_metadata(tmp_path / METADATA_NAME)


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_as_an_index(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "index"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        load_metadata(path)
