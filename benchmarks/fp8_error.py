# SPDX-License-Identifier: Apache-2.0
"""Relative error of a linear layer in emulated block FP8, next to that of BF16.

The three products of a layer (output, gradient of the input, gradient of the weight) are compared
with float64 products of the same bfloat16 operands. Shapes are those of Qwen3-30B-A3B; what enters
is a normal distribution with and without a few features that are much larger, as activations have.

    python benchmarks/fp8_error.py --json benchmarks/results/fp8_error_cpu.json

BF16: operands as they are, float32 sums, the result rounded to BF16. FP8: operands rounded to FP8,
float32 sums, the result not rounded, so that what is shown is what FP8 itself adds.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import describe_environment
from megatron.rl.model.fp8 import FP8Settings
from megatron.rl.model.fp8_emulation import BlockwiseLinear, emulated_recipe

PRODUCTS = ("output", "dx", "dw")
# Features in and out, of one rank at tensor parallelism 1.
LAYERS = {"qkv": (2048, 5120), "proj": (4096, 2048), "fc1": (2048, 1536), "fc2": (768, 2048)}
INPUTS = ("normal", "outliers")
# One feature in so many is larger by this factor.
OUTLIER_EVERY = 128
OUTLIER_FACTOR = 100.0


@dataclass(frozen=True)
class Row:
    """Relative errors, ||result - exact|| / ||exact||, of one layer and one kind of input."""

    layer: str
    inputs: str
    precision: str
    output: float
    dx: float
    dw: float


def main() -> int:
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for layer in LAYERS
        for inputs in INPUTS
        for row in measure(layer, inputs, options.tokens, options.seed)
    ]
    print(f"{'layer':6} {'inputs':9} {'precision':18} " + " ".join(f"{p:>8}" for p in PRODUCTS))
    for row in rows:
        errors = " ".join(f"{getattr(row, product):8.2%}" for product in PRODUCTS)
        print(f"{row.layer:6} {row.inputs:9} {row.precision:18} {errors}")
    if options.json is not None:
        result = {
            "environment": describe_environment(),
            "tokens": options.tokens,
            "seed": options.seed,
            "layers": LAYERS,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(layer: str, inputs: str, tokens: int, seed: int) -> list[Row]:
    """Return a row for each precision."""
    x, weight, dy = operands(*LAYERS[layer], tokens=tokens, inputs=inputs, seed=seed)
    exact = products(x.double(), weight.double(), dy.double())
    results = {"bf16": tuple(p.bfloat16() for p in products(x.float(), weight.float(), dy.float()))}
    for scales in ("power_of_two", "float32"):
        for fp8_format in ("e4m3", "hybrid"):
            settings = FP8Settings("blockwise", format=fp8_format, scales=scales)
            results[f"{fp8_format} {scales}"] = emulated(x, weight, dy, settings)
    return [
        Row(layer, inputs, name, *(error(a, b) for a, b in zip(result, exact, strict=True)))
        for name, result in results.items()
    ]


def operands(
    features_in: int, features_out: int, *, tokens: int, inputs: str, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, K], weight [N, K] and dy [T, N] in bfloat16."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    x, weight = normal(tokens, features_in), normal(features_out, features_in)
    dy = normal(tokens, features_out)
    if inputs == "outliers":
        x[:, ::OUTLIER_EVERY] *= OUTLIER_FACTOR
        # Tokens matter differently: advantages and masks scale whole rows of a gradient.
        dy *= 10 ** torch.empty(tokens, 1).uniform_(-3, 0, generator=generator)
    return x.bfloat16(), (0.02 * weight).bfloat16(), dy.bfloat16()


def products(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, dx and dw."""
    return x @ weight.t(), dy @ weight, dy.t() @ x


def emulated(
    x: Tensor, weight: Tensor, dy: Tensor, settings: FP8Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, dx and dw, through operands in FP8."""
    # float32 copies of the same numbers: the result is not rounded to BF16 then.
    x, weight = x.float().requires_grad_(), weight.float().requires_grad_()
    output: Tensor = BlockwiseLinear.apply(x, weight, emulated_recipe(settings))
    dx, dw = torch.autograd.grad(output, (x, weight), dy.float())
    return output.detach(), dx, dw


def error(result: Tensor, exact: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((result.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    sys.exit(main())
