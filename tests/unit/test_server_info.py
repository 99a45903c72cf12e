# SPDX-License-Identifier: Apache-2.0
"""What a server says about itself (recorded from vLLM 0.32, shortened), and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.rl.rollout.checkpoint_index import read_checkpoint_index
from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.rollout.server.info import (
    ServerInfo,
    check_server,
    read_server_info,
    serves_own_folder,
)
from megatron.rl.rollout.server.start import VLLMServerConfig, server_arguments
from tests.checkpoints import QWEN3_MOE, write_checkpoint

EXTENSION = "megatron.rl.rollout.worker.worker_extension.RolloutWorkerExtension"
RECORDED = json.loads(
    '{"vllm_config":{"model_config":{"model":"/srv/moe","dtype":"torch.float32",'
    '"max_model_len":256,"quantization":null,"max_logprobs":21,'
    '"logprobs_mode":"processed_logprobs","served_model_name":"/srv/moe",'
    '"enable_sleep_mode":false,"logits_processors":null},"parallel_config":{'
    '"tensor_parallel_size":1,"worker_extension_cls":"' + EXTENSION + '"},'
    '"weight_transfer_config":{"backend":"pdm_shared_memory"}}}'
)


def read(answer: Any) -> ServerInfo:
    return read_server_info(answer, "0.32.0", 2, EXTENSION)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "moe", QWEN3_MOE)


def test_a_recorded_answer() -> None:
    info = read(RECORDED)
    assert (info.model, info.dtype, info.world_size) == ("/srv/moe", "float32", 2)
    assert (info.max_model_len, info.max_logprobs) == (256, 21)
    assert info.transfer_backend == "pdm_shared_memory"
    assert info.has_extension
    assert not info.sleep_mode
    plain = copy.deepcopy(RECORDED)
    plain["vllm_config"]["weight_transfer_config"] = None
    plain["vllm_config"]["parallel_config"]["worker_extension_cls"] = ""
    info = read(plain)
    assert info.transfer_backend is None
    assert not info.has_extension


@pytest.mark.parametrize("answer", [None, {}, {"vllm_config": "text"}, {"vllm_config": {}}])
def test_another_answer(answer: Any) -> None:
    with pytest.raises(EngineConfigError, match=r"not that of vLLM 0\.32"):
        read(answer)


@pytest.mark.parametrize(
    ("section", "changes", "match"),
    [
        ("model_config", {"logprobs_mode": "raw_logprobs"}, "log-probs are raw_logprobs"),
        ("model_config", {"max_logprobs": 20}, "at most 20 log-probs a token, and the top 20"),
        ("model_config", {"max_model_len": 255}, "255 tokens is shorter"),
        ("model_config", {"logits_processors": ["x:Y"]}, "behind the trainer's back"),
    ],
)
def test_servers_that_cannot_be_trained_on(
    folder: Path, section: str, changes: dict[str, Any], match: str
) -> None:
    index = read_checkpoint_index(str(folder))
    check_server(read(RECORDED), index, 20, 256, "Start it so.")
    answer = copy.deepcopy(RECORDED)
    answer["vllm_config"][section] |= changes
    with pytest.raises(EngineConfigError, match=rf"{match}.*Start it so\.$"):
        check_server(read(answer), index, 20, 256, "Start it so.")


def test_no_limit_on_log_probs(folder: Path) -> None:
    answer = copy.deepcopy(RECORDED)
    answer["vllm_config"]["model_config"]["max_logprobs"] = -1
    check_server(read(answer), read_checkpoint_index(str(folder)), 20, 256, "")


def test_the_model_is_compared_where_its_folder_is_visible(folder: Path, tmp_path: Path) -> None:
    index = read_checkpoint_index(str(folder))
    answer = copy.deepcopy(RECORDED)
    link = tmp_path / "link"
    link.symlink_to(folder)
    answer["vllm_config"]["model_config"]["model"] = str(link)
    check_server(read(answer), index, 20, 256, "")
    assert serves_own_folder(read(answer), str(folder))
    for name, changes, match in (
        ("other", {"num_hidden_layers": QWEN3_MOE["num_hidden_layers"] + 1}, "another one"),
        ("words", {"vocab_size": QWEN3_MOE["vocab_size"] + 8}, "vocabulary of"),
    ):
        other = write_checkpoint(tmp_path / name, QWEN3_MOE | changes)
        answer["vllm_config"]["model_config"]["model"] = str(other)
        assert not serves_own_folder(read(answer), str(folder))
        with pytest.raises(EngineConfigError, match=match):
            check_server(read(answer), index, 20, 256, "")


def test_the_advised_command(folder: Path) -> None:
    config = VLLMServerConfig("http://127.0.0.1:1", str(folder), 256, top_logprobs=20)
    arguments = server_arguments(config, read_checkpoint_index(str(folder)))
    settings = dict(itertools.pairwise(arguments))
    assert settings["--max-logprobs"] == "21"
    assert settings["--logprobs-mode"] == "processed_logprobs"
    assert json.loads(settings["--weight-transfer-config"]) == {"backend": "pdm_shared_memory"}
    assert settings["--worker-extension-cls"] == EXTENSION
