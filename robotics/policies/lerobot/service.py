"""A LeRobot policy or reward classifier in a separate process, run by path in lerobot's Python environment.

It loads a folder written by `PreTrainedPolicy.save_pretrained`, with its pre- and post-processors, and answers
observations with chunks of actions; or one of `PreTrainedRewardModel.save_pretrained`, and answers images with
probabilities of success. It imports lerobot, torch and numpy, and nothing from this package; see `mmrl.workers.serve`.

Shapes: B rows, K control steps, D entries of an action, V further cameras, P past control steps, S state entries, C
cameras.

Source: huggingface/lerobot 0.6.1, src/lerobot/policies/factory.py, src/lerobot/scripts/lerobot_eval.py,
    src/lerobot/rewards/classifier.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

PAST = "past_"
TOKENIZERS = ("tokenizer_name", "model_name")
"""Entries of a processor step that refer to a tokenizer; the second is GR00T's."""
HUB_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")
PREPROCESSOR, REWARD_PREPROCESSOR = "policy_preprocessor.json", "classifier_preprocessor.json"
LARGEST_SETTINGS = 64 * 2**20
"""Maximum size of a JSON file of the folder, in bytes, as of files that the suite reads itself."""
STATE, IMAGES, TASK, ACTION = "observation.state", "observation.image", "task", "action"


class RefusedError(Exception):
    """The policy in the folder cannot be served; the message is for the user."""

    for_user = True


class LeRobotService:
    """Responds to observations with chunks of actions."""

    def __init__(
        self, folder: str, device: str, cameras: list[str] | None = None, tokenizer: str | None = None
    ) -> None:
        import lerobot.policies  # noqa: F401  registers the types of policies that config.json may name
        from lerobot.configs.policies import PreTrainedConfig

        _check_files(folder, "policy", PREPROCESSOR)
        # `local_files_only` throughout: nothing is downloaded behind the user's back
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        config.device = device
        if hasattr(config, "compile_model"):  # compiled code would ignore the integrator of `FlowService`
            config.compile_model = False
        if hasattr(config, "pretrained_backbone_weights"):  # they would be downloaded and then overwritten
            config.pretrained_backbone_weights = None
        self._folder = Path(folder)
        self._device = device
        self._config = config
        self._cameras = self._read_cameras(cameras)
        # before the policy: a missing tokenizer is cheaper to find than a missing weight
        self._before, self._after = self._processors(tokenizer)
        self._policy = self._loaded()
        self._state = STATE in config.input_features  # read after loading: pi0.5 adds one if the folder has none
        # A queue means that predictions read several observations, which only `select_action` collects. For diffusion
        # `_batch` builds the same row of observations; other types are not known to work with it.
        queued = set(getattr(self._policy, "_queues", None) or ()) - {ACTION}
        if queued and config.type != "diffusion":
            raise RefusedError(
                f"{folder} contains a policy of type {config.type}, whose predictions read a queue of observations "
                "that only its select_action fills; of the policies that take several observations in a row, only "
                "diffusion is supported"
            )
        self._history = int(config.n_obs_steps) if queued else 1

    def hello(self) -> Mapping[str, Any]:
        """Sizes of inputs and outputs; the chunk length is measured on a prediction."""
        import lerobot

        # a prediction for zeros: the configuration types have no common entry for the length of a chunk
        blank = self._blank()
        _, found = self.answer({"tasks": [""], "seed": 0}, blank)
        executed: Any = getattr(self._config, "n_action_steps", found["actions"].shape[1])
        return {
            "type": self._config.type,
            "image_size": list(blank["images"].shape[1:3]) if self._cameras else None,
            "image_fit": self._image_fit(),
            "cameras": self._cameras,
            "state_size": blank["state"].shape[1] if self._state else None,
            "chunk": found["actions"].shape[1],
            "action_size": found["actions"].shape[2],
            "executed": int(executed),
            "ensemble": getattr(self._config, "temporal_ensemble_coeff", None),
            "history": self._history,
            "lerobot": lerobot.__version__,
            "data": data_statistics([self._before, self._after]),
        }

    def _image_fit(self) -> str | None:
        """How the policy treats non-square images; None if it uses them unchanged."""
        pads = getattr(self._config, "resize_imgs_with_padding", None) or getattr(
            self._config, "image_resolution", None
        )
        return "pad" if pads else None

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Predict `actions` (B, K, D) float32 in the units of the policy's training data.

        `fields` has `tasks`, B instructions, and `seed` for policies that sample their actions. `arrays` has `images`
        (B, H, W, 3) uint8, `views` (B, V, H, W, 3) uint8 of the cameras after the first, and `state` (B, S) float32, if
        the policy uses them. A policy that uses P + 1 consecutive observations also gets those of the last P control
        steps, oldest first, as `past_images` (B, P, H, W, 3) and so on; without a past, the present observation is
        repeated.
        """
        with torch.inference_mode():
            # lerobot's policies draw from the global generator
            torch.manual_seed(fields["seed"])
            chunk = self._policy.predict_action_chunk(self._batch(fields["tasks"], arrays))
            return {}, {"actions": self._finished(chunk)}

    def close(self) -> None:
        """Nothing to free."""

    def _processors(self, tokenizer: str | None) -> tuple[Any, Any]:
        """The folder's processors; a hub tokenizer that they refer to is replaced by the given folder."""
        from lerobot.policies.factory import make_pre_post_processors

        saved = read_settings(self._folder / PREPROCESSOR)
        # class paths of newer folders end in the name under which overrides are looked up
        named = [
            (step.get("registry_name") or step["class"].rpartition(".")[2], key, step["config"][key])
            for step in saved["steps"]
            for key in TOKENIZERS
            if step.get("config", {}).get(key)
        ]
        overrides = {"device_processor": {"device": self._device}}
        if tokenizer and not named:
            raise RefusedError(f"{self._folder} does not read text, so model.options.tokenizer has no effect")
        for step, key, name in named:
            if tokenizer:
                overrides[step] = {key: tokenizer}
            elif not _at_hand(name):
                raise RefusedError(
                    f"{self._folder} reads text with the tokenizer of {name}, which is neither a folder nor in the "
                    "local Hugging Face cache, and nothing is downloaded automatically. Set model.options.tokenizer "
                    f"to a folder that contains it, or download it once: hf download {name} (if it is gated, first "
                    "accept its terms on the Hub and run hf auth login)"
                )
        processors: tuple[Any, Any] = make_pre_post_processors(
            self._config, pretrained_path=str(self._folder), preprocessor_overrides=overrides
        )
        return processors

    def _loaded(self) -> Any:
        """The policy with the weights of the folder.

        If pi0 and pi0.5 cannot read them, they only print the reason and continue with random weights; here this is an
        error.
        """
        from lerobot.policies.factory import get_policy_class

        base = getattr(self._config, "base_model_path", None)
        if base and not _at_hand(base):
            raise RefusedError(
                f"{self._folder} is built on {base}, base_model_path in its config.json, which is neither a folder "
                "nor in the local Hugging Face cache, and nothing is downloaded automatically. Set it to a folder, "
                f"or download it once: hf download {base}"
            )
        kind = get_policy_class(self._config.type)
        load, reason = torch.nn.Module.load_state_dict, "lerobot did not read them"

        # only the call for the whole policy counts: backbones load weights of their parts on the way
        def noted(module: torch.nn.Module, *given: Any, **options: Any) -> Any:
            nonlocal reason
            try:
                found = load(module, *given, **options)
            except RuntimeError as error:
                reason = " ".join(str(error).split()) if isinstance(module, kind) else reason
                raise
            reason = "" if isinstance(module, kind) else reason
            return found

        # the folder's reader swallows the error, so it is caught where torch raises it
        with patch.object(torch.nn.Module, "load_state_dict", noted):
            policy = kind.from_pretrained(str(self._folder), config=self._config, local_files_only=True)
        if reason:
            raise RefusedError(f"the weights of {self._folder} do not belong to a {self._config.type}: {reason:.300}")
        return policy.eval()

    def _read_cameras(self, wanted: list[str] | None) -> list[str]:
        """Image features of the policy in the order of the simulator's cameras."""
        features = self._config.input_features
        # the policy fills these features itself if they are missing
        empty = [f"{IMAGES}s.empty_camera_{number}" for number in range(getattr(self._config, "empty_cameras", 0))]
        known = [key for key in features if key.startswith(IMAGES) and key not in empty]
        if wanted and sorted(wanted) != sorted(known):
            raise RefusedError(
                f"model.options.cameras is [{', '.join(wanted)}]; {self._folder} has the cameras "
                f"{', '.join(known) or 'none'}. List each of them once"
            )
        others = set(features) - {*known, *empty, STATE}
        if others:
            raise RefusedError(
                f"{self._folder} needs {', '.join(features)}; only cameras and a state are available, not "
                f"{', '.join(sorted(others))}"
            )
        cameras = wanted or known
        _check_one_size(self._folder, features, cameras)
        return cameras

    def _finished(self, chunk: torch.Tensor) -> np.ndarray:
        """Convert actions (B, K, D) of the model to the units of its data; processors take one action at a time."""
        if self._config.type == "groot":  # relative actions are decoded by their position in the chunk
            found: torch.Tensor = self._after(chunk)
        else:
            found = torch.stack([self._after(chunk[:, step]) for step in range(chunk.shape[1])], 1)
        return found.float().cpu().numpy()

    def _blank(self) -> dict[str, np.ndarray]:
        """Black images and a zero state, if the policy uses them."""
        features, blank = self._config.input_features, {}
        if self._cameras:
            _, height, width = features[self._cameras[0]].shape
            blank["images"] = np.zeros((1, height, width, 3), np.uint8)
        if len(self._cameras) > 1:
            blank["views"] = np.zeros((1, len(self._cameras) - 1, height, width, 3), np.uint8)
        if self._state:
            blank["state"] = np.zeros((1, features[STATE].shape[0]), np.float32)
        return blank

    def _observation(self, tasks: list[str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        batch: dict[str, Any] = {TASK: tasks}
        if self._state:
            batch[STATE] = torch.from_numpy(arrays["state"])
        for number, camera in enumerate(self._cameras):
            batch[camera] = _pixels(arrays["images"] if number == 0 else arrays["views"][:, number - 1])
        return batch

    def _batch(self, tasks: list[str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Observations as the policy expects them, with several consecutive ones (B, P + 1, ...) if it uses them.

        These equal the queues of lerobot's `select_action` when a chunk is predicted.
        """
        present = self._before(self._observation(tasks, arrays))
        if self._history == 1:
            return present
        # each observation goes through the processor separately, as when `select_action` fills its queues
        past = {name[len(PAST) :]: part for name, part in arrays.items() if name.startswith(PAST)}
        row = [present] * self._history
        for step in range(self._history - 1 if past else 0):
            row[step] = self._before(self._observation(tasks, {name: part[:, step] for name, part in past.items()}))
        keys = [key for key in (STATE, *self._cameras) if key in present]
        return present | {key: torch.stack([each[key] for each in row], 1) for key in keys}


class FlowService(LeRobotService):
    """The flow head of a policy (SmolVLA, pi0, pi0.5): velocities, their gradients, and weights.

    Shapes: B rows, K control steps, M entries of a padded action, S denoising steps.

    lerobot integrates every flow head with one function, `euler_integrate`, which calls the head's `denoise_step`. Both
    are replaced during a call, so that the policy itself prepares observations and chunks. This is necessary because
    its methods accept no other integrator, and only pass the keys and values of images, text and state that the head
    attends to on to `denoise_step`. These are computed without gradients and cached for the last observations. The
    trained weights are those that a velocity then still depends on: the action expert with its projections.

    Source: huggingface/lerobot 0.6.1, src/lerobot/policies/common/flow_matching.py, smolvla/modeling_smolvla.py,
        pi0/modeling_pi0.py, pi05/modeling_pi05.py.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        # `euler_integrate` is replaced in the module that calls it, not where it is defined
        self._module: Any = sys.modules[type(self._policy).__module__]
        self._model: Any = getattr(self._policy, "model", None)
        if not hasattr(self._module, "euler_integrate") or not hasattr(self._model, "denoise_step"):
            raise RefusedError(
                f"{self._folder} contains a policy of type {self._config.type}, which has no trainable flow head; "
                "use model.kind lerobot to learn a Gaussian around its actions"
            )
        # SmolVLA says `num_steps`, pi0 and pi0.5 `num_inference_steps`
        self._steps = int(getattr(self._config, "num_steps", None) or self._config.num_inference_steps)
        self._width = int(self._config.max_action_dim)
        self._uploads = 0
        # the keys and values of the last observations and a digest of these: the forward and the backward pass ask for
        # the same ones. They stay valid after an upload, since no trained weight enters them.
        self._seen: tuple[str, dict[str, Any]] = ("", {})
        self._weights = self._trained_weights()
        self._requests: dict[str, Callable[[dict[str, Any], dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
            "initial": self._initial,
            "upload": self._upload,
            "sample": self._sample,
            "velocities": self._velocities,
            "gradients": self._gradients,
            "normalised": self._normalised,
            "save": self._save,
        }

    def hello(self) -> Mapping[str, Any]:
        """Sizes of inputs and outputs, and of the flow."""
        return {**super().hello(), "steps": self._steps, "width": self._width}

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Answer the request `fields["do"]`, a key of `_requests`, or predict a chunk.

        Every request except `upload` and `initial` contains the number of the last upload. If it differs, because the
        process was restarted, the answer is just `stale`.
        """
        request = fields.get("do")
        if request is None:
            return super().answer(fields, arrays)
        if request not in ("upload", "initial") and fields["upload"] != self._uploads:
            return {"stale": True}, {}
        return {}, self._requests[request](fields, arrays)

    def _trained_weights(self) -> dict[str, torch.nn.Parameter]:
        """Weights that a velocity depends on, given the keys and values that the head attends to."""
        # found by differentiating a velocity rather than by name: the families call their parts differently
        context = self._context({"tasks": [""]}, self._blank())
        noise = torch.zeros(1, self._config.chunk_size, self._width, device=self._device)
        everything = {name: weight for name, weight in self._policy.named_parameters() if weight.requires_grad}
        with torch.enable_grad():
            velocity = self._velocity(context, noise, torch.ones(1, device=self._device))
            gradients = torch.autograd.grad(velocity.sum(), list(everything.values()), allow_unused=True)
        pairs = zip(everything.items(), gradients, strict=True)
        return {name: weight for (name, weight), gradient in pairs if gradient is not None}

    def _initial(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The trained weights by name, float32."""
        return {name: weight.detach().float().cpu().numpy() for name, weight in self._weights.items()}

    def _upload(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Replace the given weights."""
        with torch.no_grad():
            for name, values in arrays.items():
                self._weights[name].copy_(torch.from_numpy(values))
        self._uploads = fields["upload"]
        return {}

    def _sample(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Sample chunks with S affine steps x' = a x + b velocity + std noise.

        `table` is (S, 4): time, a, b and std of each step; `noise` (B, S + 1, K, M) starts with x at time 1. With
        `previous` and `weights` (B, K, M), the velocities are pulled towards a running chunk by at most `limit`.
        """
        noise, table = self._tensor(arrays.pop("noise")), arrays.pop("table")
        chain, velocities = [noise[:, 0]], []
        running = [self._tensor(arrays.pop(name)) for name in ("previous", "weights") if name in arrays]

        def integrate(denoise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *_: Any, **__: Any) -> Any:
            for step, (time, kept, moved, std) in enumerate(table.tolist()):
                at = torch.full((len(noise),), time, device=self._device)
                if running:
                    previous, weights = running
                    velocities.append(_guided(denoise, chain[-1], at, previous, weights, fields["limit"]))
                else:
                    velocities.append(denoise(chain[-1], at))
                chain.append(kept * chain[-1] + moved * velocities[-1] + std * noise[:, step + 1])
            return chain[-1]

        actions = self._finished(self._predict(fields, arrays, integrate))
        return {"actions": actions, "chain": _stacked(chain), "velocities": _stacked(velocities)}

    def _velocities(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Velocities (B, S, K, M) at `points` (B, S, K, M) and `times` (B, S)."""
        points, times = self._tensor(arrays.pop("points")), self._tensor(arrays.pop("times"))
        context = self._context(fields, arrays)
        with torch.no_grad():
            steps = range(points.shape[1])
            return {"velocities": _stacked([self._velocity(context, points[:, at], times[:, at]) for at in steps])}

    def _gradients(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gradient of sum(`cotangents` * velocities) for each trained weight, one denoising step at a time."""
        points, times = self._tensor(arrays.pop("points")), self._tensor(arrays.pop("times"))
        cotangents = self._tensor(arrays.pop("cotangents"))
        context, weights = self._context(fields, arrays), list(self._weights.values())
        # summed in float32, step by step: only one step's graph is in memory, and bfloat16 weights lose nothing
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for at in range(points.shape[1]):
            with torch.enable_grad():
                velocity = self._velocity(context, points[:, at], times[:, at])
                gradients = torch.autograd.grad(velocity, weights, cotangents[:, at].to(velocity))
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient
        return {name: total.cpu().numpy() for name, total in zip(self._weights, sums, strict=True)}

    def _normalised(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert `actions` (B, K, D) from the units of the data to those of the head, (B, K, M)."""
        if getattr(self._config, "adapt_to_pi_aloha", False):
            raise RefusedError(f"{self._folder} has adapt_to_pi_aloha; demonstrations in its units are not supported")
        actions = torch.from_numpy(arrays.pop("actions"))
        batch = self._before(self._observation(fields["tasks"], arrays) | {ACTION: actions})
        return {"actions": self._policy.prepare_action(batch).float().cpu().numpy()}

    def _save(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write a folder that lerobot can load: current weights, all other files copied."""
        target = Path(fields["folder"])
        self._policy.save_pretrained(target)
        # processors and statistics belong to the policy: without them lerobot cannot load the folder
        for file in self._folder.iterdir():
            if file.is_file() and file.name != "model.safetensors":
                shutil.copy2(file, target / file.name)
        return {"bytes": np.array((target / "model.safetensors").stat().st_size)}

    def _context(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Keys and values that the head attends to, as arguments of its `denoise_step`; the last result is cached."""
        digest = hashlib.blake2b(repr(fields["tasks"]).encode())
        for name in sorted(arrays):
            digest.update(name.encode() + arrays[name].tobytes())
        if self._seen[0] != digest.hexdigest():
            arguments: dict[str, Any] = {}

            def integrate(
                denoise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], noise: torch.Tensor, *_: Any, **__: Any
            ) -> torch.Tensor:
                # one call of the head, intercepted for its arguments; the chunk that comes of it is discarded
                with patch.object(self._model, "denoise_step", lambda **given: arguments.update(given)):
                    denoise(noise, torch.ones(len(noise), device=noise.device))
                return noise

            self._predict(fields, arrays, integrate)
            # the two that change with each step; the rest is the same for a whole chunk
            context = {name: value for name, value in arguments.items() if name not in ("x_t", "timestep")}
            self._seen = (digest.hexdigest(), context)
        return self._seen[1]

    def _velocity(self, context: dict[str, Any], point: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """(B, K, M), (B,) -> (B, K, M); keys and values appended by the head do not reach the cached context."""
        # the cache and its layers are copied, not the tensors: appending replaces a layer's tensors
        cache = copy.copy(context["past_key_values"])
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        velocity: torch.Tensor = self._model.denoise_step(
            **context | {"past_key_values": cache, "x_t": point, "timestep": time}
        )
        return velocity

    def _predict(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray], integrate: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Predict a chunk (B, K, D) as lerobot does, but with a different integrator."""
        batch = self._before(self._observation(fields["tasks"], arrays))
        with patch.object(self._module, "euler_integrate", integrate), torch.no_grad():
            chunk: torch.Tensor = self._policy.predict_action_chunk(batch)
        return chunk

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class RewardService:
    """Responds to images with the probabilities of success that a reward classifier sees in them.

    Images pass through the processor that was saved with the classifier, as in its training. lerobot's own robot loop
    (`RewardClassifierProcessorStep`) leaves it out, so its probabilities differ where that processor normalises.
    """

    def __init__(self, folder: str, device: str, trust_remote_code: bool) -> None:
        from lerobot.configs.rewards import RewardModelConfig
        from lerobot.processor import PolicyProcessorPipeline
        from lerobot.rewards.factory import get_reward_model_class

        _check_files(folder, "reward classifier", REWARD_PREPROCESSOR)
        if (kind := read_settings(Path(folder) / "config.json").get("type")) != "reward_classifier":
            raise RefusedError(f"{folder} contains a reward model of type {kind}; only reward_classifier is supported")
        config = RewardModelConfig.from_pretrained(folder, local_files_only=True)
        if config.num_classes != 2:
            raise RefusedError(f"{folder} has {config.num_classes} classes; success and failure are expected")
        config.device = device if torch.cuda.is_available() else "cpu"
        features = config.input_features
        self._cameras = [key for key in features if key.startswith(IMAGES)]
        _check_one_size(folder, features, self._cameras)
        self._size = list(features[self._cameras[0]].shape[1:])
        devices = {"device_processor": {"device": config.device}}
        self._before = PolicyProcessorPipeline.from_pretrained(
            folder, config_filename=REWARD_PREPROCESSOR, overrides=devices
        )
        self._model = _classifier(get_reward_model_class(config.type), folder, config, trust_remote_code)

    def hello(self) -> Mapping[str, Any]:
        """Names of the C image features in their order, and their size."""
        import lerobot

        return {"cameras": self._cameras, "image_size": self._size, "lerobot": lerobot.__version__}

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Predict `probabilities` (B,) float32 of success for `images` (B, C, H, W, 3) uint8."""
        with torch.inference_mode():
            seen = {key: _pixels(arrays["images"][:, number]) for number, key in enumerate(self._cameras)}
            batch = self._before(seen)
            found = self._model.predict([batch[key] for key in self._cameras]).probabilities
        return {}, {"probabilities": found.float().cpu().numpy()}

    def close(self) -> None:
        """Nothing to free."""


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON object of a policy's folder, which somebody else may have written; raises RefusedError."""
    if (size := file.stat().st_size) > LARGEST_SETTINGS:
        raise RefusedError(f"{file} has {size} bytes; at most {LARGEST_SETTINGS} are allowed")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{file} cannot be read as JSON: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise RefusedError(f"{file} must contain a JSON object, not {type(found).__name__}")
    return found


def data_statistics(processors: list[Any]) -> dict[str, dict[str, list[float]]]:
    """Minimum and maximum action and state of a policy's training data, as stored in its processors."""
    found: dict[str, dict[str, list[float]]] = {}
    for step in (step for processor in processors for step in getattr(processor, "steps", ())):
        for key, part in (getattr(step, "stats", None) or {}).items():
            if key in (STATE, ACTION):
                ends = {name: np.ravel(np.asarray(part[name], np.float64)) for name in ("min", "max") if name in part}
                found.setdefault(key, {}).update({name: values.tolist() for name, values in ends.items()})
    return {key: part for key, part in found.items() if len(part) == 2}


def _classifier(kind: Any, folder: str, config: Any, trust_remote_code: bool) -> Any:
    """The classifier with the weights of the folder; raises RefusedError if its encoder cannot be built."""
    import transformers

    if not _at_hand(config.model_name):
        raise RefusedError(
            f"{folder} is built on the encoder {config.model_name}, model_name in its config.json, which is neither a "
            "folder nor in the local Hugging Face cache, and nothing is downloaded automatically. Set it to a folder, "
            f"or download it once: hf download {config.model_name}"
        )
    load = transformers.AutoModel.from_pretrained

    # lerobot itself always passes trust_remote_code=True
    def limited(name: str, **options: Any) -> Any:
        return load(name, **options | {"trust_remote_code": trust_remote_code})

    with patch.object(transformers.AutoModel, "from_pretrained", limited):
        try:
            model = kind.from_pretrained(folder, config=config, local_files_only=True)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise RefusedError(
                f"the encoder {config.model_name} of {folder} runs code that comes with it. Read that code; if you "
                "trust it, set success.trust_remote_code=true"
            ) from None
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise RefusedError(f"the weights of {folder} do not belong to its classifier: {reason:.300}") from None
    if missing := _missing(model, Path(folder) / "model.safetensors"):
        raise RefusedError(f"the weights of {folder} lack {', '.join(missing)[:300]}")
    return model


def _missing(model: torch.nn.Module, file: Path) -> list[str]:
    """Names of tensors that a file has under none of their names; cameras share an encoder, which is stored once."""
    from safetensors import safe_open

    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    with safe_open(file, "pt") as content:
        stored = set(content.keys())
    return [shared[0] for shared in names.values() if stored.isdisjoint(shared)]


def _check_files(folder: str, what: str, preprocessor: str) -> None:
    for name in ("config.json", "model.safetensors", preprocessor):
        if not (Path(folder) / name).is_file():
            raise RefusedError(f"{folder} is not a LeRobot {what}: it has no {name}")


def _check_one_size(folder: Path | str, features: Mapping[str, Any], cameras: list[str]) -> None:
    sizes = {key: tuple(features[key].shape) for key in cameras}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} {shape[1]} x {shape[2]}" for key, shape in sizes.items())
        raise RefusedError(
            f"the cameras of {folder} have images of different sizes ({listed}), but here all images have the same size"
        )


def _pixels(images: np.ndarray) -> torch.Tensor:
    """Images (B, H, W, 3) uint8 as (B, 3, H, W) in 0..1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def _at_hand(name: str) -> bool:
    """Whether a hub model is available as a folder or in the cache."""
    from huggingface_hub import try_to_load_from_cache

    return Path(name).is_dir() or any(isinstance(try_to_load_from_cache(name, file), str) for file in HUB_FILES)


def _guided(
    denoise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    point: torch.Tensor,
    time: torch.Tensor,
    previous: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Velocity pulled towards a running chunk; a copy of `guided_velocity`, as the package cannot be imported here."""
    sigma = float(time[0])
    with torch.enable_grad():
        point = point.detach().requires_grad_()
        velocity = denoise(point, time)
        clean = point - sigma * velocity
        (pull,) = torch.autograd.grad(clean, point, (weights * (previous - clean.detach())).to(clean))
    scale = limit if sigma == 1 else min(limit, (sigma**2 + (1 - sigma) ** 2) / (sigma * (1 - sigma)))
    return velocity.detach() - scale * pull


def _stacked(tensors: list[torch.Tensor]) -> np.ndarray:
    """Stack the B rows of each step as (B, S, ...) float32."""
    return torch.stack(tensors, 1).float().cpu().numpy()


make, make_flow, make_reward = LeRobotService, FlowService, RewardService
"""Factories of the worker's services."""
