# SPDX-License-Identifier: Apache-2.0
"""Rollouts: the engine protocol, the vLLM engine process, and the records they exchange.

Nothing is imported here, on purpose: the engine's process runs `python -m
megatron.rl.rollout.worker.process`, possibly under another Python, and must not pull in the
trainer's libraries; the trainer must not pull in vLLM.
"""
