"""OpenVLA-OFT folders with action tokens, for evaluation and training: the policies used by SimpleVLA-RL and SRPO.

Shapes: B rows, K control steps, D entries of an action, T = K D tokens, H x W pixels.

The model is that of the folder, by code of this package (`prismatic`); the folder's own Python files are not run. One
pass predicts the T tokens of a chunk as the last 256 ids of the vocabulary, at its first 32000 of 32064 rows. They are
bins of -1..1; with `acting.scale: bounds_q99` the statistics of the training data (`norm_stats` in config.json, or
dataset_statistics.json) turn them into actions. A saved policy is a folder that OpenVLA's code loads again.

Source: OpenVLA-OFT, arXiv 2502.19645; moojink/openvla-oft experiments/robot/openvla_utils.py, robot_utils.py;
    SimpleVLA-RL, arXiv 2509.09674; PRIME-RL/SimpleVLA-RL verl/workers/rollout/rob_rollout.py, actor/dp_rob.py.

Differences: those of `openvla_folder`; no state. Folders with an action head are `openvla_regression`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mmrl.errors import UserError
from robotics.policies.base.action_policy import ActionChoice, PolicyInputs, TokenPolicy
from robotics.policies.base.action_tokens import ActionTokenizer
from robotics.policies.base.saved import read_units, write_config
from robotics.policies.openvla.openvla_folder import (
    HEAD,
    PROJECTOR,
    OpenVlaConfig,
    OpenVlaFolder,
    find_part,
    read_saved_config,
)
from robotics.policies.openvla.prismatic import load_prismatic, save_prismatic


class OpenVlaPolicy(TokenPolicy):
    """Image and instruction to K * D action tokens by the model of an OpenVLA-OFT folder.

    policy = OpenVlaPolicy(OpenVlaConfig("openvla-oft-libero", unnorm_key="libero_10_no_noops", gripper="libero"))
    choice = policy.act(batch, torch.Generator().manual_seed(0))
    """

    def __init__(self, config: OpenVlaConfig) -> None:
        folder = OpenVlaFolder(config)
        for name in (HEAD, PROJECTOR):
            file = find_part(folder.path, name)
            if file is not None:
                raise UserError(
                    f"{folder.path} has {file.name}; a policy with action tokens has neither an action head nor a "
                    "state. Use OpenVlaRegressionPolicy for folders with a head"
                )
        tokenizer = ActionTokenizer(folder.bins, "openvla")
        super().__init__(tokenizer, config.chunk, folder.statistics.size, config.label_smoothing)
        self.settings = config
        self.folder = folder
        self.statistics = folder.statistics
        self.views = config.num_images_in_input - 1
        self.image_fit = "stretch"  # of the only image_resize_strategy that OpenVlaFolder takes
        self.model = folder.load()

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions for each row; actions are normalised by `statistics`."""
        choice = super().act(batch, generator, temperature, greedy)
        return ActionChoice(self.folder.to_sim(choice.actions), choice.decisions, choice.logp)

    def logits(self, batch: PolicyInputs) -> Tensor:
        pixels, prompts = self.folder.look(batch, self.device)
        causal = self.settings.attention == "causal"
        return self.model.logits(pixels, prompts, self.decisions, self.tokenizer.bins, causal)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of behaviour cloning; actions in the units of `act`."""
        return super().bc_loss(batch, self.folder.from_sim(actions), mask, generator)

    def save_pretrained(self, path: Path | str) -> None:
        """Write a folder that OpenVLA's code loads again, with a policy.json of this package in it."""
        save_prismatic(self.model, self.folder.path, Path(path))
        write_config(Path(path), "openvla", self.settings, self)

    def load_weights(self, path: Path | str) -> None:
        self.model.load_state_dict(load_prismatic(Path(path), self.folder.dtype).state_dict())
        read_units(Path(path), self)

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Open what `save_pretrained` wrote."""
        policy = cls(read_saved_config(path))
        read_units(Path(path), policy)
        return policy
