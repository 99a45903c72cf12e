# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face hub, fetched only where the user names one as such."""

from pathlib import Path

from megatron.rl.errors import UserError

HUB_PREFIX = "hf:"
PATTERNS = ["*.parquet", "*.jsonl", "*.json", "data/*.parquet", "data/*.jsonl", "data/*.json"]


def download_dataset(name: str) -> Path:
    """Fetch the tables of a data set, or find them in the cache; return their folder.

    Args:
        name: ``ORG/NAME``, or ``ORG/NAME@REVISION`` for a fixed state of it.

    Raises:
        UserError: no such data set, no network, or no huggingface_hub.
    """
    repository, _, revision = name.partition("@")
    by_hand = (
        f"download it on a machine with network (huggingface-cli download --repo-type dataset "
        f"{repository} --local-dir DIR) and give DIR instead"
    )
    if repository.count("/") != 1:
        raise UserError(f"{HUB_PREFIX}{name}: expected {HUB_PREFIX}ORG/NAME")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{HUB_PREFIX}{name} needs the package huggingface_hub; install it, or {by_hand}"
        ) from None
    try:
        folder = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, allow_patterns=PATTERNS
        )
    # The hub's errors share no base class: they come from its own, from HTTP and from files.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{HUB_PREFIX}{name}: not fetched ({reason}); {by_hand}") from None
    return Path(folder)
