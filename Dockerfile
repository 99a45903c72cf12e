# SPDX-License-Identifier: Apache-2.0
#
# The trainer on NVIDIA's PyTorch image, whose torch, Transformer Engine, apex, flash-attention and
# modelopt are used as they are, and vLLM with a torch of its own beside them. docs/cluster.md says
# which image and why. Written without a container builder at hand: never built.
#
#   docker build -t pdm-rl .
#   docker run --rm --gpus all --ipc host -v /data:/data -v /shared/runs:/opt/pdm-rl/runs pdm-rl \
#       bash examples/rl/qwen3_8b.sh --dry-run

# Its torch is of the release that requirements/train.txt pins; a test compares the two.
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3
# hadolint ignore=DL3006 # the tag is in BASE
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/pdm-rl

# The image's constraints (PIP_CONSTRAINT) stay as they are: nothing of ours goes into its packages
# but uv, whose version stands in requirements/dev.txt.
COPY requirements/ requirements/
RUN grep -m 1 '^uv==' requirements/dev.txt >/tmp/uv.txt \
    && python -m pip install --no-cache-dir --no-deps -r /tmp/uv.txt \
    && rm /tmp/uv.txt

COPY pyproject.toml setup.py README.md LICENSE ./
COPY docker/ docker/
COPY tools/ tools/
COPY examples/ examples/
COPY pdm/ pdm/
COPY pdm_rl/ pdm_rl/
COPY megatron/ megatron/

# tools/bootstrap.sh makes .venv, which sees the image's packages, and .venv-rollout, which does not.
# What the image brought must then be what the trainer finds.
RUN python docker/image_packages.py >/tmp/before.txt \
    && UV_NO_CACHE=1 PDM_DEVICE=gpu bash tools/bootstrap.sh \
    && .venv/bin/python docker/image_packages.py | diff /tmp/before.txt - \
    && rm /tmp/before.txt .bootstrap.log

# Ubuntu's image has a user 1000 already. Runs are the only thing written; mount a shared disk there.
RUN useradd --create-home --uid 10001 trainer \
    && install -d -o trainer -g trainer runs

ENV PATH=/opt/pdm-rl/.venv/bin:${PATH} \
    PYTHON=/opt/pdm-rl/.venv/bin/python \
    PDM_RL_ROLLOUT_PYTHON=/opt/pdm-rl/.venv-rollout/bin/python \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1

USER 10001:10001
# Imports Megatron in a fresh interpreter: seconds of one core.
HEALTHCHECK --interval=10m --timeout=3m --start-period=3m CMD ["pdm-rl", "doctor"]
CMD ["pdm-rl", "--help"]
