# SPDX-License-Identifier: Apache-2.0
"""Print version and place of each package that an NVIDIA image brings and that must stay its own.

The Dockerfile compares what the image's interpreter says with what the trainer's says. It imports
none of them: no GPU is there when an image is built.
"""

import importlib.metadata
import importlib.util

# Module and distribution; compiled against each other, and against the image's CUDA.
PACKAGES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "triton": "triton",
    "transformer_engine": "transformer-engine",
    "apex": "apex",
    "flash_attn": "flash-attn",
    "modelopt": "nvidia-modelopt",
}


def describe(module: str, distribution: str) -> str:
    """Return one line: module, version, and where it is found."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return f"{module} not there"
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return f"{module} {version} {spec.origin}"


if __name__ == "__main__":
    for names in PACKAGES.items():
        print(describe(*names))
