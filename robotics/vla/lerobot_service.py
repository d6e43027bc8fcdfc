"""A LeRobot policy in a process of its own; run by path in the interpreter of lerobot, see `mmrl.workers.serve`.

It loads a folder that `PreTrainedPolicy.save_pretrained` wrote, with the pre- and post-processors beside it, and
answers observations with chunks of actions. Only lerobot, torch and numpy are imported, nothing of this package.

Source: huggingface/lerobot 0.6.1, src/lerobot/policies/factory.py, src/lerobot/scripts/lerobot_eval.py.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import torch

PAST = "past_"
STATE, IMAGES, TASK, ACTION = "observation.state", "observation.image", "task", "action"


class RefusedError(Exception):
    """The folder holds something that cannot be served; its message is for the user."""

    for_user = True


class LeRobotService:
    """Answers observations with chunks of actions."""

    def __init__(self, folder: str, device: str, cameras: list[str] | None = None) -> None:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        for name in ("config.json", "model.safetensors"):
            if not (Path(folder) / name).is_file():
                raise RefusedError(f"{folder} is no LeRobot policy: it has no {name}")
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        config.device = device
        if hasattr(config, "compile_model"):  # compiled code would not see the steps of `FlowService`
            config.compile_model = False
        if hasattr(config, "pretrained_backbone_weights"):  # fetched from the net, and then replaced by the saved ones
            config.pretrained_backbone_weights = None
        # Features of the policy's own making, which it fills itself where nothing is given.
        empty = [f"{IMAGES}s.empty_camera_{number}" for number in range(getattr(config, "empty_cameras", 0))]
        known = [key for key in config.input_features if key.startswith(IMAGES) and key not in empty]
        self._cameras = _in_order(folder, known, cameras)
        self._state = STATE in config.input_features
        others = set(config.input_features) - {*known, *empty, STATE}
        if others:
            raise RefusedError(
                f"{folder} needs {', '.join(config.input_features)}; here are cameras and a state, not "
                f"{', '.join(sorted(others))}"
            )
        sizes = {key: tuple(config.input_features[key].shape) for key in self._cameras}
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{key} {shape[1]} x {shape[2]}" for key, shape in sizes.items())
            raise RefusedError(f"the cameras of {folder} have images of different sizes ({said}); those here have one")
        self._folder, self._device, self._config = Path(folder), device, config
        self._policy = get_policy_class(config.type).from_pretrained(folder, config=config, local_files_only=True)
        self._policy.eval()
        queued = set(getattr(self._policy, "_queues", None) or ()) - {ACTION}
        if queued and config.type != "diffusion":
            raise RefusedError(
                f"{folder} holds a policy of type {config.type}, whose predictions read a queue of observations that "
                "only its select_action fills; of policies that take several in a row, diffusion is served"
            )
        self._history = int(config.n_obs_steps) if queued else 1
        overrides = {"device_processor": {"device": device}}
        self._before, self._after = make_pre_post_processors(
            config, pretrained_path=folder, preprocessor_overrides=overrides
        )

    def hello(self) -> Mapping[str, Any]:
        """Sizes of what goes in and out; the length of a chunk is that of one that is predicted."""
        import lerobot

        blank = self._blank()
        _, found = self.answer({"tasks": [""], "seed": 0}, blank)
        return {
            "type": self._config.type,
            "image_size": list(blank["images"].shape[1:3]) if self._cameras else None,
            "cameras": self._cameras,
            "state_size": blank["state"].shape[1] if self._state else None,
            "chunk": found["actions"].shape[1],
            "action_size": found["actions"].shape[2],
            "history": self._history,
            "lerobot": lerobot.__version__,
        }

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Predict chunks.

        Args:
            fields: `tasks`, B instructions, and `seed`, of the noise of policies that draw their actions.
            arrays: `images` (B, H, W, 3) uint8, `views` (B, V, H, W, 3) uint8 of its cameras after the first, and
                `state` (B, S) float32, where the policy has them; where it takes P + 1 observations in a row also those
                of the P control steps before, the oldest first, as `past_images` (B, P, H, W, 3) and so on. Without a
                past the present observation is repeated.

        Returns:
            `actions` (B, K, D) float32 in the units of the data that the policy learned from.
        """
        import torch

        with torch.inference_mode():
            torch.manual_seed(fields["seed"])
            chunk = self._policy.predict_action_chunk(self._batch(fields["tasks"], arrays))
            return {}, {"actions": self._finished(chunk)}

    def close(self) -> None:
        """Nothing to free."""

    def _finished(self, chunk: torch.Tensor) -> np.ndarray:
        """(B, K, D) actions of the model in the units of its data; the processors take the actions one by one."""
        import torch

        return torch.stack([self._after(chunk[:, step]) for step in range(chunk.shape[1])], 1).float().cpu().numpy()

    def _blank(self) -> dict[str, np.ndarray]:
        """Black images and a state of zeros, where the policy has them."""
        import numpy as np

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
        import torch

        batch: dict[str, Any] = {TASK: tasks}
        if self._state:
            batch[STATE] = torch.from_numpy(arrays["state"])
        for number, camera in enumerate(self._cameras):
            images = arrays["images"] if number == 0 else arrays["views"][:, number - 1]
            batch[camera] = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        return batch

    def _batch(self, tasks: list[str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Observations as the policy takes them, several in a row (B, P + 1, ...), where it does.

        Those are what the queues of lerobot's `select_action` hold when a chunk is predicted.
        """
        import torch

        present = self._before(self._observation(tasks, arrays))
        if self._history == 1:
            return present
        past = {name[len(PAST) :]: part for name, part in arrays.items() if name.startswith(PAST)}
        row = [present] * self._history
        for step in range(self._history - 1 if past else 0):
            row[step] = self._before(self._observation(tasks, {name: part[:, step] for name, part in past.items()}))
        seen = [key for key in (STATE, *self._cameras) if key in present]
        return present | {key: torch.stack([each[key] for each in row], 1) for key in seen}


class FlowService(LeRobotService):
    """The flow head of a policy (SmolVLA, pi0): its velocities, their gradients, and its weights.

    lerobot integrates every flow head with one function, `euler_integrate`, which calls the head's `denoise_step`. Both
    are replaced, so that observations and chunks are prepared by the policy itself. What the head attends to (the keys
    and values of images, text and state) is computed without gradients and kept for the last observations; trained are
    the weights that a velocity then still depends on, which is the action expert with its projections.

    Shapes: B rows, K control steps, M entries of a padded action, S denoising steps.

    Source: huggingface/lerobot 0.6.1, src/lerobot/policies/common/flow_matching.py, smolvla/modeling_smolvla.py,
        pi0/modeling_pi0.py.
    """

    def __init__(self, folder: str, device: str, cameras: list[str] | None = None) -> None:
        super().__init__(folder, device, cameras)
        self._module: Any = sys.modules[type(self._policy).__module__]
        if not hasattr(self._module, "euler_integrate") or not hasattr(
            getattr(self._policy, "model", None), "denoise_step"
        ):
            raise RefusedError(
                f"{folder} holds a policy of type {self._config.type}, which has no flow head that can be trained; "
                "model.kind lerobot learns a Gaussian around its actions"
            )
        self._model: Any = self._policy.model
        self._integrate, self._denoise = self._module.euler_integrate, self._model.denoise_step
        self._steps = int(getattr(self._config, "num_steps", None) or self._config.num_inference_steps)
        self._width, self._uploads = int(self._config.max_action_dim), 0
        self._seen: tuple[str, dict[str, Any]] = ("", {})
        self._weights = self._trained()

    def hello(self) -> Mapping[str, Any]:
        """Sizes of what goes in and out, and of the flow."""
        return {**super().hello(), "steps": self._steps, "width": self._width}

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Do what `fields["do"]` says, or predict a chunk.

        Every request but `upload` and `initial` names the number of the last upload; where that is another one, because
        the process was started again, the answer is only `stale`.
        """
        task = fields.get("do")
        if task is None:
            return super().answer(fields, arrays)
        if task not in ("upload", "initial") and fields["upload"] != self._uploads:
            return {"stale": True}, {}
        return {}, getattr(self, f"_{task}")(fields, arrays)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Weights that a velocity depends on, given what the head attends to."""
        import torch

        context = self._context({"tasks": [""]}, self._blank())
        noise = torch.zeros(1, self._config.chunk_size, self._width, device=self._device)
        everything = {name: weight for name, weight in self._policy.named_parameters() if weight.requires_grad}
        with torch.enable_grad():
            velocity = self._velocity(context, noise, torch.ones(1, device=self._device))
            found = torch.autograd.grad(velocity.sum(), list(everything.values()), allow_unused=True)
        pairs = zip(everything.items(), found, strict=True)
        return {name: weight for (name, weight), gradient in pairs if gradient is not None}

    def _initial(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The trained weights by name, float32."""
        return {name: weight.detach().float().cpu().numpy() for name, weight in self._weights.items()}

    def _upload(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Replace the weights that are given."""
        import torch

        with torch.no_grad():
            for name, values in arrays.items():
                self._weights[name].copy_(torch.from_numpy(values))
        self._uploads = fields["upload"]
        return {}

    def _sample(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Chunks by S affine steps x' = a x + b velocity + std noise.

        `table` is (S, 4): time, a, b and std of each step; `noise` (B, S + 1, K, M) begins with x at time 1.
        """
        import torch

        noise, table = self._tensor(arrays.pop("noise")), arrays.pop("table")
        chain, velocities = [noise[:, 0]], []

        def integrate(denoise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *_: Any, **__: Any) -> Any:
            for step, (time, kept, moved, std) in enumerate(table.tolist()):
                velocities.append(denoise(chain[-1], torch.full((len(noise),), time, device=self._device)))
                chain.append(kept * chain[-1] + moved * velocities[-1] + std * noise[:, step + 1])
            return chain[-1]

        actions = self._finished(self._predict(fields, arrays, integrate))
        return {"actions": actions, "chain": _array(chain), "velocities": _array(velocities)}

    def _velocities(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Velocities (B, S, K, M) at `points` (B, S, K, M) and `times` (B, S)."""
        import torch

        points, times = self._tensor(arrays.pop("points")), self._tensor(arrays.pop("times"))
        context = self._context(fields, arrays)
        with torch.no_grad():
            steps = range(points.shape[1])
            return {"velocities": _array([self._velocity(context, points[:, at], times[:, at]) for at in steps])}

    def _gradients(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gradient of sum(`cotangents` * velocities) for each trained weight; one denoising step at a time."""
        import torch

        points, times = self._tensor(arrays.pop("points")), self._tensor(arrays.pop("times"))
        cotangents = self._tensor(arrays.pop("cotangents"))
        context, weights = self._context(fields, arrays), list(self._weights.values())
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for at in range(points.shape[1]):
            with torch.enable_grad():
                velocity = self._velocity(context, points[:, at], times[:, at])
                found = torch.autograd.grad(velocity, weights, cotangents[:, at].to(velocity))
            for total, gradient in zip(sums, found, strict=True):
                total += gradient
        return {name: total.cpu().numpy() for name, total in zip(self._weights, sums, strict=True)}

    def _normalised(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`actions` (B, K, D) in the units of the data as the head sees them, (B, K, M)."""
        import torch

        if getattr(self._config, "adapt_to_pi_aloha", False):
            raise RefusedError(f"{self._folder} has adapt_to_pi_aloha; demonstrations in its units are not supported")
        actions = torch.from_numpy(arrays.pop("actions"))
        batch = self._before(self._observation(fields["tasks"], arrays) | {ACTION: actions})
        return {"actions": self._policy.prepare_action(batch).float().cpu().numpy()}

    def _save(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write a folder that lerobot loads: the weights as they are now, everything else as it was."""
        import numpy as np

        target = Path(fields["folder"])
        self._policy.save_pretrained(target)
        for file in self._folder.iterdir():
            if file.is_file() and file.name != "model.safetensors":
                shutil.copy2(file, target / file.name)
        return {"bytes": np.array((target / "model.safetensors").stat().st_size)}

    def _context(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """What the head attends to, as arguments of its `denoise_step`."""
        digest = hashlib.blake2b(repr(fields["tasks"]).encode())
        for name in sorted(arrays):
            digest.update(name.encode() + arrays[name].tobytes())
        if self._seen[0] != digest.hexdigest():
            self._seen = (digest.hexdigest(), self._observed(fields, arrays))
        return self._seen[1]

    def _observed(self, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {}

        def integrate(
            denoise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], noise: torch.Tensor, *_: Any, **__: Any
        ) -> torch.Tensor:
            self._model.denoise_step = lambda **arguments: found.update(arguments)
            try:
                denoise(noise, torch.ones(len(noise), device=noise.device))
            finally:
                self._model.denoise_step = self._denoise
            return noise

        self._predict(fields, arrays, integrate)
        return {name: value for name, value in found.items() if name not in ("x_t", "timestep")}

    def _velocity(self, context: dict[str, Any], point: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """(B, K, M), (B,) -> (B, K, M); the keys and values that the head appends do not reach the context."""
        cache = copy.copy(context["past_key_values"])
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        return self._denoise(**context | {"past_key_values": cache, "x_t": point, "timestep": time})

    def _predict(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray], integrate: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Predict a chunk as lerobot does, (B, K, D), with another integrator."""
        import torch

        self._module.euler_integrate = integrate
        try:
            with torch.no_grad():
                chunk = self._policy.predict_action_chunk(self._before(self._observation(fields["tasks"], arrays)))
        finally:
            self._module.euler_integrate = self._integrate
        return chunk

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        import torch

        return torch.from_numpy(values).to(self._device)


def _array(tensors: list[torch.Tensor]) -> np.ndarray:
    """B rows of a step each, as (B, S, ...) float32."""
    import torch

    return torch.stack(tensors, 1).float().cpu().numpy()


def _in_order(folder: str, known: list[str], wanted: list[str] | None) -> list[str]:
    """Image features in the order of the simulator's cameras."""
    if wanted and sorted(wanted) != sorted(known):
        raise RefusedError(
            f"model.options.cameras is [{', '.join(wanted)}]; {folder} has the cameras {', '.join(known) or 'none'}. "
            "Name each of them once"
        )
    return wanted or known


def make(folder: str, device: str = "cpu", cameras: list[str] | None = None) -> LeRobotService:
    """Make the service of a worker; arguments as for `LeRobotService`."""
    return LeRobotService(folder, device, cameras)


def make_flow(folder: str, device: str = "cpu", cameras: list[str] | None = None) -> FlowService:
    """Make the service of a worker for a flow head; arguments as for `LeRobotService`."""
    return FlowService(folder, device, cameras)
