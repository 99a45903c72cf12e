# SPDX-License-Identifier: Apache-2.0
"""The file that makes a checkpoint complete: every other file with its size and digest.

It is written last. A folder without it, or whose files are not those that it lists, is no
checkpoint. Its own last line is the digest of the lines before, so that no flipped byte anywhere
in a checkpoint goes unnoticed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rl.checkpoint.durable import write_flushed

MANIFEST_NAME = "manifest.json"
FORMAT = 1
# Hardware computes SHA-256 at about 2 GB/s a core; hashlib releases the interpreter meanwhile.
_ALGORITHM = "sha256"
_MAX_MANIFEST_BYTES = 256 << 20


class DamagedCheckpoint(Exception):
    """A folder that is not a complete checkpoint; says what is wrong with it."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint, by its path within the folder."""

    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer steps taken.
        score: held-out score at that point, higher is better; None where none was measured.
        layout: parallel sizes of the run that saved it.
        files: every file but the manifest itself, by its path with ``/``.
    """

    step: int
    score: float | None
    layout: Mapping[str, int]
    files: Mapping[str, FileEntry]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())


def describe_file(path: Path) -> FileEntry:
    """Return size and digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _ALGORITHM).hexdigest()
        return FileEntry(file.tell(), digest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a folder a complete checkpoint; the last thing to be written into it."""
    content = json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, sort_keys=True)
    lines = f"{content}\n{_text_digest(content)}\n"
    write_flushed(folder / MANIFEST_NAME, lines.encode())


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check that its files are there, with the right sizes.

    Reads no other file. :func:`find_damage` compares the digests.

    Raises:
        DamagedCheckpoint: no manifest, a damaged one, or files are missing or too many.
    """
    manifest = _parse(folder / MANIFEST_NAME)
    found = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    found.pop(MANIFEST_NAME)
    for name, entry in manifest.files.items():
        if name not in found:
            raise DamagedCheckpoint(f"{name} is missing")
        if found[name] != entry.nbytes:
            raise DamagedCheckpoint(
                f"{name} has {found[name]} bytes, the manifest says {entry.nbytes}"
            )
    if unknown := found.keys() - manifest.files.keys():
        raise DamagedCheckpoint(f"{min(unknown)} is not in the manifest")
    return manifest


def find_damage(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> str | None:
    """Compare the digests of this share of the files; return what differs, or None.

    Reads every byte of the share once, at the speed of SHA-256 or of the disk. Shares are even in
    bytes as far as whole files allow.
    """
    loads = [0] * shares
    for name, entry in sorted(manifest.files.items(), key=lambda item: (-item[1].nbytes, item[0])):
        owner = loads.index(min(loads))
        loads[owner] += entry.nbytes
        if owner != share:
            continue
        try:
            found = describe_file(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != entry:
            return f"{name} is not what was saved: its digest differs"
    return None


def _parse(path: Path) -> Manifest:
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise DamagedCheckpoint(f"{MANIFEST_NAME} is too large")
        content, _, rest = path.read_bytes().decode().partition("\n")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {MANIFEST_NAME}: its saving was cut short") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST_NAME} cannot be read: {error}") from None
    if rest != _text_digest(content) + "\n":
        raise DamagedCheckpoint(f"{MANIFEST_NAME} is not what was saved: its digest differs")
    try:
        fields: dict[str, Any] = json.loads(content)
        if fields.pop("format") != FORMAT:
            raise DamagedCheckpoint(f"{MANIFEST_NAME} has another format than {FORMAT}")
        files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
        return Manifest(files=files, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST_NAME} is no manifest: {error!r}") from None


def _text_digest(text: str) -> str:
    return hashlib.new(_ALGORITHM, text.encode()).hexdigest()
