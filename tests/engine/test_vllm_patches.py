# SPDX-License-Identifier: Apache-2.0
"""What replaces parts of vLLM gives what these parts gave. In a process of its own: they stay."""

import os
import subprocess
import sys

SCRIPT = """
import numpy as np
import torch
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.sampler import Sampler
import vllm.v1.engine.logprobs as module

from megatron.rl.rollout.worker.fast_topk import install_fast_topk
from megatron.rl.rollout.worker.logprob_rows import LogprobRows, install_logprob_rows

K = 20
torch.manual_seed(0)
log_probs = torch.randn(16, 9001).log_softmax(-1)
sampled = torch.randint(9001, (16,))
original = Sampler.gather_logprobs
expected = original(log_probs, K, sampled)
install_fast_topk()
install_fast_topk()
got = Sampler.gather_logprobs(log_probs, K, sampled)
assert Sampler.gather_logprobs is not original
assert torch.equal(got.logprob_token_ids, expected.logprob_token_ids)
assert torch.equal(got.logprobs, expected.logprobs)
for left, right in zip(got, expected):
    assert type(left) is type(right)
    assert left is None or (left.dtype, left.shape) == (right.dtype, right.shape)


def processor(flat):
    return LogprobsProcessor(None, module.create_sample_logprobs(flat), None, 0.0, K, None)


flat = processor(True)
install_logprob_rows()
install_logprob_rows()
rows, plain = processor(True), processor(False)
assert isinstance(rows.logprobs, LogprobRows) and isinstance(plain.logprobs, list)
for step in range(150):
    # Two columns more than asked for, as in a batch with a request that asks for more.
    ids = np.random.default_rng(step).integers(0, 9001, (1, K + 3)).astype(np.int32)
    values = np.random.default_rng(step).normal(size=(1, K + 3)).astype(np.float32)
    lists = LogprobsLists(ids, values, np.ones(1, dtype=np.int64))
    cut = LogprobsLists(ids[:, : K + 1], values[:, : K + 1], np.ones(1, dtype=np.int64))
    flat._update_sample_logprobs(cut)
    rows._update_sample_logprobs(lists)
    plain._update_sample_logprobs(lists)
    # vLLM reuses its arrays.
    ids[:], values[:] = -5, -5.0
assert len(rows.logprobs) == len(plain.logprobs) == 150
np.testing.assert_array_equal(rows.logprobs.ids.reshape(-1), flat.logprobs.token_ids)
np.testing.assert_array_equal(rows.logprobs.values.reshape(-1), np.float32(flat.logprobs.logprobs))
print("same")
"""


def test_the_replacements_give_the_same():
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("same"), done.stderr[-2000:]
