"""OpenVLA-OFT folders with an action head learned by L1 regression, evaluated and improved.

Shapes: B rows, K control steps, D entries of an action, T = K D positions, S state entries, C hidden units.

The head maps the states of the language model at the T positions of a chunk to K actions in one pass, whereas
`OpenVlaPolicy` reads tokens there. The state of the robot is one more embedding after the patches. Greedy actions are
the head's output. It has no likelihood, so reinforcement learning uses it as the mean of a Gaussian with a learned
standard deviation per action entry. A control step is a decision, with the log-density of its D entries; the
temperature multiplies the standard deviations.

Cloning minimises the L1 distance between the head's output and the demonstrated actions, as in OpenVLA-OFT's training;
it does not train the standard deviations.

Actions are normalised and, as in OpenVLA-OFT's own evaluation, not clipped: beyond -1..1 the statistics extrapolate,
and the simulator's limits apply. Without statistics, after cloning with `acting.scale: none`, they are clipped. A saved
policy is a folder that OpenVLA-OFT's code can load.

Source: OpenVLA-OFT, arXiv 2502.19645; moojink/openvla-oft prismatic/extern/hf/modeling_prismatic.py (predict_action),
    experiments/robot/openvla_utils.py (normalize_proprio), vla-scripts/finetune.py (loss).

Differences: those of `openvla_folder`. A state entry that is constant in the data becomes 0, as in OpenVLA-OFT's
training; its evaluation makes -1 of it. The cloning loss leaves out control steps after the end of a demonstration;
there the last action is repeated. Weights have the dtype of the model, there bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from mmrl.errors import UserError
from robotics.policies.base.action_policy import ActionChoice, ActionPolicy, PolicyInputs, check_demonstrations
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.saved import read_units, write_config
from robotics.policies.openvla.openvla_folder import (
    HEAD,
    PROJECTOR,
    OpenVlaConfig,
    OpenVlaFolder,
    StateProjector,
    fill_part,
    find_part,
    load_head,
    load_projector,
    read_part,
    read_saved_config,
    write_part,
    write_tensors,
)
from robotics.policies.openvla.prismatic import load_prismatic, save_prismatic

LOG_STD_FILE = "log_std.pt"
"""Only read by this package. A safetensors file would be mistaken for one of the model's."""


@dataclass(frozen=True)
class ReadSizes:
    """Sizes of a policy's inputs other than images, whose size is arbitrary."""

    state_size: int | None
    """S; None without a state."""


class OpenVlaRegressionPolicy(ActionPolicy):
    """The action head of an OpenVLA-OFT folder and a learned Gaussian around its actions.

    config = OpenVlaConfig("openvla-7b-oft-finetuned-libero-10", num_images_in_input=2, gripper="libero")
    policy = OpenVlaRegressionPolicy(config)
    choice = policy.act(batch, torch.Generator().manual_seed(0), greedy=True)
    """

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__()
        self.folder = OpenVlaFolder(config)
        path = self.folder.path
        head, projector = find_part(path, HEAD), find_part(path, PROJECTOR)
        if head is None:
            raise UserError(f"{path} has no {HEAD}--*_checkpoint.pt; use OpenVlaPolicy for folders with action tokens")
        if config.label_smoothing:
            raise UserError(f"label_smoothing has no effect on {path}, which has an action head and no bins")
        # the names carry a step number, which OpenVLA-OFT expects again
        self._files = {HEAD: head.name} | ({} if projector is None else {PROJECTOR: projector.name})
        self.settings = config
        self.statistics = self.folder.statistics
        self.views = config.num_images_in_input - 1
        self.image_fit = "stretch"  # of the only image_resize_strategy that OpenVlaFolder takes
        self.chunk = config.chunk
        self.action_size = self.statistics.size
        self.decisions = config.chunk
        self.model = self.folder.load()
        self.model.language_model.lm_head.requires_grad_(False)  # not read
        self.head = load_head(head, self.action_size, self.model.hidden_size).to(self.folder.dtype)
        self.state_projector: StateProjector | None = None
        if projector is not None:
            self._states = self.folder.read_statistics("proprio")
            found = load_projector(projector, self._states.size, self.model.hidden_size)
            self.state_projector = found.to(self.folder.dtype)
        self.config = ReadSizes(None if projector is None else self._states.size)
        self.log_std = nn.Parameter(torch.full((self.action_size,), math.log(config.std)))

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk for each row; actions are normalised by `statistics`, or clipped if there are none."""
        with torch.no_grad():
            mean, std = self._gaussian(batch, temperature)
            # drawn in greedy mode too, so that both modes leave the generators alike
            noise = draw_rows(torch.randn, mean.shape, generator).to(mean, non_blocking=True)
            drawn = mean if greedy else mean + std * noise
            logp = Normal(mean, std, validate_args=False).log_prob(drawn).sum(-1)
        actions = drawn.clamp(-1, 1) if self.statistics is None else drawn
        # the gripper is converted after the decision is stored: `to_sim` cannot be inverted exactly
        return ActionChoice(self.folder.to_sim(actions), drawn, logp)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Score decisions; decisions are (B, K, D), the normalised actions before the gripper is converted.

        Gradient: into the head, the projectors, the language model and the standard deviations; with `train: all` into
        the vision backbones too.
        """
        mean, std = self._gaussian(batch, temperature)
        density = Normal(mean, std, validate_args=False)
        return density.log_prob(decisions.to(mean)).sum(-1), density.entropy().sum(-1)

    def predict(self, batch: PolicyInputs) -> Tensor:
        """(B, K, D) float32 output of the head, normalised, the gripper as in the data."""
        pixels, prompts = self.folder.look(batch, self.device)
        tokens, causal = self.chunk * self.action_size, self.settings.attention == "causal"
        states = self.model.hidden(pixels, prompts, tokens, causal, self._state_embedding(batch))
        found: Tensor = self.head(states)
        return found.float()

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of behaviour cloning; the mean L1 distance of the head's output, actions in the units of `act`.

        Gradient: into all trainable weights but the standard deviations.
        """
        check_demonstrations(self, batch, actions, mask)
        mean = self.predict(batch)
        distance = (mean - self.folder.from_sim(actions).to(mean)).abs().mean(-1)
        weight = mask.to(mean)
        loss = (distance * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"bc/loss": float(loss.detach())}

    def save_pretrained(self, path: Path | str) -> None:
        """Write a folder that OpenVLA-OFT's code loads again, with a policy.json and log_std.pt of this package."""
        target = Path(path)
        save_prismatic(self.model, self.folder.path, target, without=tuple(self._files.values()))
        for name, part in self._parts().items():
            write_part(part, target / self._files[name])
        write_tensors({"log_std": self.log_std}, target / LOG_STD_FILE)
        write_config(target, "openvla_regression", self.settings, self)

    def load_weights(self, path: Path | str) -> None:
        folder = Path(path)
        for name, part in self._parts().items():
            file = find_part(folder, name)
            if file is None:
                raise UserError(f"{folder} has no {name}--*_checkpoint.pt, so it is not a saved policy of this kind")
            fill_part(part, read_part(file), file, assign=False)
        self.model.load_state_dict(load_prismatic(folder, self.folder.dtype).state_dict())
        self._restore(folder)

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Open what `save_pretrained` wrote."""
        policy = cls(read_saved_config(path))
        policy._restore(Path(path))
        return policy

    def _restore(self, folder: Path) -> None:
        """Read the files that this package adds to those of OpenVLA-OFT."""
        found = read_part(folder / LOG_STD_FILE).get("log_std")
        if found is None or found.shape != self.log_std.shape:
            raise UserError(f"{folder / LOG_STD_FILE} does not contain a log_std with {self.action_size} entries")
        with torch.no_grad():
            self.log_std.copy_(found)
        read_units(folder, self)

    def _parts(self) -> dict[str, nn.Module]:
        return {HEAD: self.head} | ({} if self.state_projector is None else {PROJECTOR: self.state_projector})

    def _gaussian(self, batch: PolicyInputs, temperature: float) -> tuple[Tensor, Tensor]:
        mean = self.predict(batch)
        # float32: the exponential of a bfloat16 parameter has steps of a percent
        return mean, (self.log_std.float().exp() * temperature).expand_as(mean)

    def _state_embedding(self, batch: PolicyInputs) -> Tensor | None:
        """(B, 1, C) from the normalised state."""
        if self.state_projector is None:
            return None
        found = None if batch.state is None else batch.state.shape[1]
        if batch.state is None or found != self._states.size:
            raise UserError(
                f"{self.folder.path} reads a state of {self._states.size} entries, but the observations have "
                f"{found or 'none'}"
            )
        # float64 until normalised, as the statistics are
        scaled = self._states.normalise(batch.state.double())
        embedded: Tensor = self.state_projector(scaled.to(self.device, self.folder.dtype))
        return embedded[:, None]
