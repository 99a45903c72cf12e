# SPDX-License-Identifier: Apache-2.0
"""Quantise a checkpoint with nvidia-modelopt: a script for an environment of its own.

modelopt cannot share the trainer's environment, so ``pdm-rl export --format modelopt:NAME`` runs
this file under the interpreter that the user names. It imports nothing of this package.

NAME stands for one of modelopt's configurations: ``fp8`` for ``FP8_DEFAULT_CFG``, ``int4_awq`` for
``INT4_AWQ_CFG``, and so on. Configurations that fix the scales of activations in advance, or search
for scales, need texts to calibrate on.

Exit codes: 0; 2 with a last line ``error: ...`` on stderr for what the user can mend; 1 otherwise.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_CALIBRATION_TOKENS = 2048


class Mistake(Exception):
    """Something that the user can mend."""


def main() -> int:
    """Quantise and export, as the arguments say."""
    parser = argparse.ArgumentParser(description="Quantise a checkpoint with nvidia-modelopt.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    parser.add_argument("--calibration", type=Path)
    options = parser.parse_args()
    try:
        quantise(options.checkpoint, options.out, options.name, options.calibration)
    except Mistake as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def quantise(checkpoint: Path, out: Path, name: str, calibration: Path | None) -> None:
    """Load the model, quantise it and write what serving engines load."""
    try:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.config import need_calibration
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise Mistake(
            f"--modelopt-python: {sys.executable} cannot import nvidia-modelopt: {error}"
        ) from error
    configuration = find_configuration(mtq, name)
    if calibration is None and need_calibration(configuration):
        raise Mistake(f"--format modelopt:{name} calibrates activations; give it --calibration")
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", local_files_only=True
    ).eval()
    # The exporter looks up the architecture here, and not every checkpoint names it.
    if not model.config.architectures:
        model.config.architectures = [type(model).__name__]
    forward = None if calibration is None else calibration_loop(checkpoint, calibration)
    mtq.quantize(model, configuration, forward)
    export_hf_checkpoint(model, export_dir=out)


def find_configuration(mtq: Any, name: str) -> dict[str, Any]:
    """Look up a configuration by its name: ``fp8`` is ``FP8_DEFAULT_CFG`` or ``FP8_CFG``."""
    known = {attribute for attribute in dir(mtq) if attribute.endswith("_CFG")}
    for suffix in ("_DEFAULT_CFG", "_CFG"):
        if name.upper() + suffix in known:
            configuration: dict[str, Any] = getattr(mtq, name.upper() + suffix)
            return configuration
    names = sorted(k.removesuffix("_CFG").removesuffix("_DEFAULT").lower() for k in known)
    raise Mistake(f"--format: modelopt has no {name!r}; it has {', '.join(names)}")


def calibration_loop(checkpoint: Path, path: Path) -> Callable[[Any], None]:
    """Return what runs a model over the calibration file."""
    import torch

    sequences = list(read_sequences(checkpoint, path))

    def run(model: Any) -> None:
        with torch.no_grad():
            for tokens in sequences:
                model(torch.tensor([tokens], device=model.device))

    return run


def read_sequences(checkpoint: Path, path: Path) -> Iterator[list[int]]:
    """Yield token ids: a line is a JSON list of them, or else a text for the tokenizer."""
    tokenizer = None
    count = 0
    for line in path.read_text().splitlines():
        if not line.strip():
            continue
        tokens = json_list(line)
        if tokens is None:
            if tokenizer is None:
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
            tokens = tokenizer(line)["input_ids"]
        count += 1
        yield tokens[:MAX_CALIBRATION_TOKENS]
    if count == 0:
        raise Mistake(f"--calibration: {path} is empty")


def json_list(line: str) -> list[int] | None:
    """Read a line as a JSON list of token ids; None when it is something else."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    ids = isinstance(value, list) and value and all(type(token) is int for token in value)
    return value if ids else None


if __name__ == "__main__":
    sys.exit(main())
