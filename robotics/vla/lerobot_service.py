"""A LeRobot policy in a process of its own; run by path in the interpreter of lerobot, see `mmrl.workers.serve`.

It loads a folder that `PreTrainedPolicy.save_pretrained` wrote, with the pre- and post-processors beside it, and
answers observations with chunks of actions. Only lerobot, torch and numpy are imported, nothing of this package.

Source: huggingface/lerobot 0.6.1, src/lerobot/policies/factory.py, src/lerobot/scripts/lerobot_eval.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

STATE, IMAGES, TASK = "observation.state", "observation.image", "task"


class RefusedError(Exception):
    """The folder holds something that cannot be served; its message is for the user."""

    for_user = True


class LeRobotService:
    """Answers observations with chunks of actions.

    Args:
        folder: of the policy.
        device: torch's name of the device.

    Raises:
        RefusedError: the folder is no LeRobot policy, or needs an observation that a simulator here does not have.
    """

    def __init__(self, folder: str, device: str) -> None:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        for name in ("config.json", "model.safetensors"):
            if not (Path(folder) / name).is_file():
                raise RefusedError(f"{folder} is no LeRobot policy: it has no {name}")
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        config.device = device
        if hasattr(config, "pretrained_backbone_weights"):  # fetched from the net, and then replaced by the saved ones
            config.pretrained_backbone_weights = None
        self._cameras = [key for key in config.input_features if key.startswith(IMAGES)]
        self._state = STATE in config.input_features
        others = set(config.input_features) - {*self._cameras, STATE}
        if len(self._cameras) > 1 or others:
            raise RefusedError(f"{folder} needs {', '.join(config.input_features)}; here are one camera and a state")
        self._device, self._config = device, config
        self._policy = get_policy_class(config.type).from_pretrained(folder, config=config, local_files_only=True)
        self._policy.eval()
        overrides = {"device_processor": {"device": device}}
        self._before, self._after = make_pre_post_processors(
            config, pretrained_path=folder, preprocessor_overrides=overrides
        )

    def hello(self) -> Mapping[str, Any]:
        """Sizes of what goes in and out; the length of a chunk is that of one that is predicted."""
        import lerobot
        import numpy as np

        features = self._config.input_features
        shape = features[self._cameras[0]].shape if self._cameras else None
        state = features[STATE].shape[0] if self._state else None
        blank: dict[str, Any] = {}
        if shape is not None:
            blank["images"] = np.zeros((1, shape[1], shape[2], 3), np.uint8)
        if state is not None:
            blank["state"] = np.zeros((1, state), np.float32)
        _, found = self.answer({"tasks": [""], "seed": 0}, blank)
        return {
            "type": self._config.type,
            "image_size": None if shape is None else [shape[1], shape[2]],
            "state_size": state,
            "chunk": found["actions"].shape[1],
            "action_size": found["actions"].shape[2],
            "history": int(self._config.n_obs_steps),
            "lerobot": lerobot.__version__,
        }

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Predict chunks.

        Args:
            fields: `tasks`, B instructions, and `seed`, of the noise of policies that draw their actions.
            arrays: `images` (B, H, W, 3) uint8 and `state` (B, S) float32, where the policy has them.

        Returns:
            `actions` (B, K, D) float32 in the units of the data that the policy learned from.
        """
        import torch

        with torch.inference_mode():
            torch.manual_seed(fields["seed"])
            batch = self._before(self._observation(fields["tasks"], arrays))
            chunk = self._policy.predict_action_chunk(self._with_history(batch))
            # The processors are made for single actions, which have the statistics of all of a chunk.
            actions = torch.stack([self._after(chunk[:, step]) for step in range(chunk.shape[1])], 1)
        return {}, {"actions": actions.float().cpu().numpy()}

    def close(self) -> None:
        """Nothing to free."""

    def _observation(self, tasks: list[str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        import torch

        batch: dict[str, Any] = {TASK: tasks}
        if self._state:
            batch[STATE] = torch.from_numpy(arrays["state"])
        if self._cameras:
            batch[self._cameras[0]] = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2).float() / 255
        return batch

    def _with_history(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Repeat the observation where the policy takes several in a row; a policy of this package has no memory."""
        steps = self._config.n_obs_steps
        if self._config.type != "diffusion":  # the only one of those served whose prediction takes a history
            return batch
        seen = [key for key in (STATE, *self._cameras) if key in batch]
        return batch | {key: batch[key].unsqueeze(1).repeat_interleave(steps, 1) for key in seen}


def make(folder: str, device: str = "cpu") -> LeRobotService:
    """Make the service of a worker; arguments as for `LeRobotService`."""
    return LeRobotService(folder, device)
