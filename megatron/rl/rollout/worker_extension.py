# SPDX-License-Identifier: Apache-2.0
"""What runs inside each of vLLM's own workers: reading new weights from a file.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls its methods by name on
every tensor-parallel rank. Only a path and names travel; each rank reads the file for itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .moe_reload_patch import install_moe_reload_patch

# Parameters that are computed from others or keep their default when a checkpoint has none.
_CHECKPOINT_SUFFIXES = (".weight", "_weight", ".bias", ".weight_scale_inv")


class RolloutWorkerExtension:
    """Mixed into vLLM's worker class, hence no state and no constructor."""

    def rollout_load_weights(self, path: str) -> int:
        """Replace the model's weights by those of a safetensors file; returns how many.

        Raises when a parameter of the model received nothing: vLLM itself only logs a warning.
        """
        install_moe_reload_patch()
        worker: Any = self
        model = worker.model_runner.get_model()
        with _watch_loading(model) as untouched:
            worker.reload_weights(weights_iterator=_read_tensors(path))
        if untouched:
            raise RuntimeError(
                f"{len(untouched)} parameters of the model received no weights, first "
                f"{sorted(untouched)[:4]}: the checkpoint's names do not cover the model"
            )
        return _count_tensors(path)


def _read_tensors(path: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - this is no dict
            yield name, file.get_tensor(name)


def _count_tensors(path: str) -> int:
    from .checkpoint_index import read_safetensors_header

    return len(read_safetensors_header(path))


@contextmanager
def _watch_loading(model: Any) -> Iterator[set[str]]:
    """Collect the parameters that `model.load_weights` did not report as loaded.

    The parameters are listed when loading begins, since by then vLLM has put quantised layers
    back into the layout of the checkpoint.
    """
    untouched: set[str] = set()
    original = model.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        expected = {
            name for name, _ in model.named_parameters() if name.endswith(_CHECKPOINT_SUFFIXES)
        }
        loaded = original(*args, **kwargs)
        if loaded is not None:
            untouched.update(expected - set(loaded))
        return loaded

    model.load_weights = load_weights
    try:
        yield untouched
    finally:
        del model.load_weights
