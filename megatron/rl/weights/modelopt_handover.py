# SPDX-License-Identifier: Apache-2.0
"""Hand a checkpoint to nvidia-modelopt, which lives in an environment of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron.rl.errors import UserError
from megatron.rl.weights.export import check_destination, read_config
from megatron.rl.weights.hf_files import copy_other_files

SCRIPT = Path(__file__).with_name("modelopt_export.py")

# What that environment needs; modelopt 0.47.0 was tested by its authors with these transformers.
REQUIREMENTS = (
    "nvidia-modelopt==0.47.0",
    "torch==2.13.0",
    "transformers>=4.57,<5.15",
    "accelerate",
    "requests",
)

_USER_MISTAKE = 2
_INSTALL_HINT = (
    "make one with `uv venv --python 3.12 DIR`, then `uv pip install --python DIR/bin/python "
    + " ".join(f"'{requirement}'" for requirement in REQUIREMENTS)
    + "`, and name DIR/bin/python"
)


class ModeloptFailed(RuntimeError):
    """modelopt stopped with an error of its own; the message says where its output is."""


def export_with_modelopt(
    checkpoint: Path,
    out: Path,
    name: str,
    *,
    python: str | None,
    calibration: str | None = None,
    force: bool = False,
) -> None:
    """Quantise a checkpoint with nvidia-modelopt and write what it exports.

    Args:
        checkpoint: a Hugging Face checkpoint in bfloat16 or float32.
        out: the folder to make.
        name: of modelopt's configuration, such as ``fp8``.
        python: the interpreter of an environment that has nvidia-modelopt.
        calibration: a file with one text, or one JSON list of token ids, a line.
        force: replace a checkpoint that is there.

    Raises:
        UserError: something to mend, in the arguments or in modelopt's environment.
        ModeloptFailed: modelopt could not do it.
    """
    if python is None:
        raise UserError(
            "--modelopt-python is missing: modelopt needs an environment of its own; "
            + _INSTALL_HINT
        )
    if shutil.which(python) is None:
        raise UserError(f"--modelopt-python: {python} is not an interpreter; {_INSTALL_HINT}")
    if calibration is not None and not Path(calibration).is_file():
        raise UserError(f"--calibration: no such file: {calibration}")
    check_destination(out, checkpoint, force=force)
    if read_config(checkpoint).get("quantization_config") is not None:
        raise UserError("SOURCE is quantised; export it with --format bf16 and quantise that")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Absolute paths: -I keeps the child from looking for modules where this process does.
        arguments = [str(checkpoint.resolve()), str(partial.resolve()), name]
        if calibration is not None:
            arguments += ["--calibration", str(Path(calibration).resolve())]
        _run(
            [python, "-I", str(SCRIPT), *arguments],
            out.with_name(out.name + ".modelopt.log"),
        )
        copy_other_files(checkpoint, partial)  # the tokenizer and the like
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run(command: list[str], log: Path) -> None:
    """Run the script; its output goes to a log, which stays when it fails."""
    print(f"nvidia-modelopt is at work; its output: {log}", file=sys.stderr)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ).returncode
    if code == 0:
        log.unlink()
        return
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no output"
    if code == _USER_MISTAKE and last.startswith("error: "):
        log.unlink()
        raise UserError(last.removeprefix("error: "))
    raise ModeloptFailed(f"nvidia-modelopt failed with exit code {code}: {last}; see {log}")
