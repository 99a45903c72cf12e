# SPDX-License-Identifier: Apache-2.0
"""A repair for vLLM 0.32 on CPU: after a weight update, a tied head computed with the old weights.

A model with tied embeddings has one parameter in two layers, the embedding and the head. An update
brings the embedding only, so vLLM's layerwise reload processes that layer and leaves the head as it
was. On a GPU the head reads the shared parameter and all is well. On a CPU it computes with a
packed copy, which was made at the first load and is not made again.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TiedHead:
    """A layer whose weight is another layer's parameter."""

    weight_name: str
    module: Any

    def repack(self) -> None:
        """Make the packed copy anew, where there is one."""
        if hasattr(self.module, "cpu_linear"):
            self.module.quant_method.process_weights_after_loading(self.module)


def find_tied_heads(model: Any) -> list[TiedHead]:
    """The layers of a model that share a weight with a layer before them; before a reload."""
    seen: set[int] = set()
    tied = []
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in seen:
            tied.append(TiedHead(f"{path}.weight", module))
        seen.add(id(weight))
    return tied
