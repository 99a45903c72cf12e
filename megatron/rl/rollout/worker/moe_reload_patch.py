# SPDX-License-Identifier: Apache-2.0
"""A repair for vLLM 0.32 on CPU: after a weight update, MoE layers computed nonsense in silence.

The CPU kernel wants the experts' weights in a packed layout, made from the checkpoint's layout by
`fused_experts.process_weights_after_loading`. `UnquantizedFusedMoEMethod._setup_kernel` has that
done only on its first call, when it builds the kernel. Later calls put the new weights there
unpacked, and the kernel reads them as if they were packed: numbers of the right size in the wrong
places, and no error. On a GPU the kernel takes what the method gives it, and nothing is wrong.

The repair runs the packing on later calls too. It does nothing on other backends. A test compares
an updated engine with a fresh one bit for bit, so it will be noticed when vLLM needs this no more
or needs something else.
"""

import functools
from typing import Any

_INSTALLED_MARK = "_repacks_experts_on_reload"


def install_moe_reload_patch() -> None:
    """Wrap the method once; raise if this vLLM has not the method that the repair is for."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    method_class = module.UnquantizedFusedMoEMethod
    original = getattr(method_class, "_setup_kernel", None)
    if original is None:
        raise RuntimeError(
            "this vLLM has no UnquantizedFusedMoEMethod._setup_kernel: moe_reload_patch is for "
            "vLLM 0.32; check whether weight updates of MoE models are exact without it"
        )
    if getattr(original, _INSTALLED_MARK, False):
        return

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, *args, **kwargs)
        if is_update and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(setup_kernel, _INSTALLED_MARK, True)
    method_class._setup_kernel = setup_kernel
