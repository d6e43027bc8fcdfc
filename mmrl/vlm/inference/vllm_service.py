"""vLLM as a service: sampling with a trainer's weights, in vLLM's own Python environment.

Run by its path (`mmrl/workers/serve.py`, `mmrl/workers/listen.py`) in an environment that has vLLM, and not this
package. Requests, each named by `do`:

- sync: load the model folder `folder` as weights `version`; the first one also starts the engine with `engine`, the
  arguments of `vllm.LLM`.
- sample: `n` responses to each prompt, with `params` and a seed each; the prompts' tokens, one placeholder an image,
  and their images (H, W, 3) uint8. Returns tokens, log-probabilities, lengths, and the prompts' tokens as read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

VARIABLES = {
    # one process, in which the weights can be reached; the compiled layers of a tied head need that
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # GiB on a CPU; without it a share of the whole memory, which the trainer needs too
    "VLLM_CPU_KVCACHE_SPACE": "4",
}
ENGINE = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "disable_log_stats": True,
    # the trainer is on the same GPU unless the user says otherwise
    "gpu_memory_utilization": 0.4,
    # a seed with a prompt that is read in parts fails on a CPU
    "enable_chunked_prefill": False,
}
"""Arguments of `vllm.LLM`: log-probabilities at the sampling temperature without banned tokens, nothing but what a
request says."""


class RequestError(Exception):
    """A request that cannot be fulfilled; the message is for the user."""

    for_user = True


def make() -> VllmService:
    """Make the service of a worker."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    return VllmService()


class VllmService:
    """One engine; see the module."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._version = -1

    def hello(self) -> Mapping[str, Any]:
        """Name and version of the engine."""
        import vllm

        return {"engine": "vllm", "release": vllm.__version__}

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Work on one request."""
        if fields["do"] == "sync":
            return self._sync(fields), {}
        return self._sample(fields, arrays)

    def close(self) -> None:
        """Free the engine."""
        self._llm = None

    def _sync(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        folder = fields["folder"]
        if not os.path.isdir(folder):
            raise RequestError(
                f"{folder} does not exist on this machine; sampler.vllm.folder must be accessible from both machines"
            )
        if self._llm is None:
            from vllm import LLM

            self._llm = LLM(model=folder, **{**ENGINE, **fields["engine"]})
        else:
            self._reload(folder)
        self._version = fields["version"]
        return {"version": self._version}

    def _reload(self, folder: str) -> None:
        from vllm.platforms import current_platform

        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if current_platform.is_cpu():
            self._llm.apply_model(_repack_heads)
        # what was computed with the old weights; without the last two, the next request of images hangs
        self._llm.reset_prefix_cache()
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _sample(
        self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        from PIL import Image
        from vllm import SamplingParams

        if self._version != fields["version"]:
            raise RequestError(f"weights {fields['version']} were requested, but {self._version} are loaded")
        prompts: list[Any] = []
        for number, images in enumerate(fields["images"]):
            shown = [Image.fromarray(arrays[f"image{number}.{place}"]) for place in range(images)]
            media = {"multi_modal_data": {"image": shown}} if shown else {}
            prompts += [{"prompt_token_ids": arrays[f"prompt{number}"].tolist(), **media}] * fields["n"]
        banned = set(fields["banned"])
        allowed = [token for token in range(fields["vocabulary"]) if token not in banned] if banned else None
        params = [
            SamplingParams(**fields["params"], seed=seed, logprobs=0, allowed_token_ids=allowed)
            for seed in fields["seeds"]
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        drawn = [output.outputs[0] for output in outputs]
        read = [output.prompt_token_ids for output in outputs[:: fields["n"]]]
        logp = [[step[token].logprob for token, step in zip(x.token_ids, x.logprobs)] for x in drawn]  # noqa: B905
        return {"finish": [_finish(x) for x in drawn]}, {
            "ids": _flat([x.token_ids for x in drawn], np.int64),
            "logp": _flat(logp, np.float64),
            "lengths": np.array([len(x.token_ids) for x in drawn], np.int64),
            "read": _flat(read, np.int64),
            "read_lengths": np.array([len(x) for x in read], np.int64),
        }


def _flat(rows: Any, dtype: Any) -> np.ndarray:
    return np.array([entry for row in rows for entry in row], dtype)


def _finish(output: Any) -> str:
    if output.finish_reason == "length":
        return "length"
    return "stop" if isinstance(output.stop_reason, str) else "eos"


def _repack_heads(model: Any) -> None:
    """Pack the head's weights again: the CPU build computes with a packed copy, which a reload leaves old if tied."""
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear") and _is_head(layer)]
    if packed:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in packed:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _is_head(layer: Any) -> bool:
    parallel = sys.modules["vllm.model_executor.layers.vocab_parallel_embedding"]
    return isinstance(layer, parallel.VocabParallelEmbedding)
