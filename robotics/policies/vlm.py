"""A vision-language-action policy on the suite's vision-language models, similar to OpenVLA-OFT.

Shapes: B rows, K control steps, D entries of an action, T = K D tokens, n bins, P prompt tokens, S state entries, H
hidden units.

A row consists of the chat prompt with the image and "What action should the robot take to ...?", a token made from the
state (if any), and T placeholders. One causal pass of the language model computes the hidden states at the
placeholders. The rows of its head for n ids of the vocabulary turn them into T distributions over n bins, which are
independent given the observation.

Source: OpenVLA-OFT, arXiv 2502.19645; moojink/openvla-oft prismatic/extern/hf/modeling_prismatic.py; the language-model
    head as likelihood: PRIME-RL/SimpleVLA-RL, sii-research/siiRL.

Differences from that code: a placeholder predicts its own token rather than the next one (there, the last prompt token
predicts the first); the prompt uses the model's chat template; the n ids are the last text tokens, because in Qwen's
vocabulary control tokens and unused rows follow them; images are not cropped to 0.9 of their area.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare
from robotics.policies.base.action_policy import PolicyInputs, TokenPolicy
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.base.action_tokens import TOKEN_MODES, ActionTokenizer
from robotics.policies.base.encoder import StateScale
from robotics.policies.base.saved import (
    check_sizes,
    make_config,
    read_config,
    read_units,
    read_weights,
    write_config,
    write_weights,
)

if TYPE_CHECKING:
    from mmrl.vlm.data.prompt import Prompt
    from mmrl.vlm.engine.vlm_policy import VlmPolicy
    from mmrl.vlm.model.model_config import ModelConfig

PLACEHOLDERS = ("zero", "learned")
VLM_FOLDER = "vlm"


@dataclass
class VlmActionConfig:
    """Sizes and settings of the policy."""

    action_size: int = rare(bounded(at_least=1))
    """D, number of entries of an action."""
    chunk: int = rare(bounded(8, at_least=1))
    """K, control steps predicted at once."""
    bins: int = rare(bounded(256, at_least=2))
    """Number of vocabulary ids used as action tokens."""
    token_mode: str = rare(choice("openvla", TOKEN_MODES))
    """openvla or uniform, see `ActionTokenizer`."""
    first_id: int | None = rare(None)
    """First of these ids. Default: the last text ids of the vocabulary."""
    placeholders: str = rare(choice("zero", PLACEHOLDERS))
    """Embeddings of the placeholders: zero, as in OpenVLA-OFT, or learned (one per placeholder)."""
    state_size: int | None = rare(bounded(None, at_least=1))
    """Number of state entries, which become one token; None for a policy without a state."""
    prompt: str = rare("What action should the robot take to {instruction}?")
    """Prompt; the instruction is lower-cased."""
    label_smoothing: float = rare(bounded(0.0, at_least=0, below=1))
    """Fraction of the cloning target that is spread over all bins."""
    label_spread: float = rare(bounded(0.0, at_least=0))
    """Standard deviation of a Gaussian cloning target on the scale of actions; 0 = only the demonstrated bin."""
    seed: int = 0
    """Seed of the weights added to the model."""

    def validate(self) -> None:
        """Check the prompt; raises UserError."""
        if "{instruction}" not in self.prompt:
            raise UserError(f"the prompt {self.prompt!r} has no {{instruction}}")


class VlmActionPolicy(TokenPolicy):
    """Maps image, instruction and state to K * D action tokens with a vision-language model.

    Args:
        vlm: the model, with or without LoRA adapters, from `mmrl.vlm.engine.vlm_policy.load_policy`.
        config: sizes and settings.

    Raises:
        UserError: a number is out of range, or there are more bins than ids in the vocabulary.
    """

    action_ids: Tensor

    def __init__(self, vlm: VlmPolicy, config: VlmActionConfig) -> None:
        check_config(config)
        tokenizer = ActionTokenizer(config.bins, config.token_mode)
        super().__init__(tokenizer, config.chunk, config.action_size, config.label_smoothing, config.label_spread)
        self.config = config
        self.vlm = vlm
        from mmrl.vlm.families.family import QwenVl

        if not isinstance(vlm.family, QwenVl):
            raise UserError("an action head on a vision-language model needs a Qwen-VL: Qwen2-VL to Qwen3-VL")
        first = _first_id(vlm, config)
        # not saved: it follows from the vocabulary and the options
        self.register_buffer("action_ids", torch.arange(first, first + config.bins), persistent=False)
        self.extra = _Extra(config, vlm.width, self.decisions)

    def logits(self, batch: PolicyInputs) -> Tensor:
        from mmrl.vlm.data.prompt import join_prompts
        from mmrl.vlm.engine.rows import text_prompt

        vlm = self.vlm
        extra = self.extra(batch, vlm.device)
        rows, count = extra.shape[:2]
        # pad ids hold the positions of the state and the placeholders, whose embeddings are read instead
        blank = text_prompt(torch.full((count,), vlm.pad_id))
        prompts = [join_prompts([prompt, blank]) for prompt in self._prompts(batch)]
        hidden = vlm.reader.read(vlm, prompts, tail=extra)
        ends = torch.tensor([len(prompt) for prompt in prompts], device=vlm.device)
        last = torch.arange(-self.decisions, 0, device=vlm.device)
        states = hidden[torch.arange(rows, device=vlm.device)[:, None], ends[:, None] + last]
        # only n rows of the head: no logits of other ids
        weight = vlm.network.get_output_embeddings().weight[self.action_ids]
        with torch.autocast(device_type=states.device.type, enabled=False):
            return functional.linear(states, weight.to(states.dtype)).float()

    def scale_states(self, statistics: StateStatistics) -> None:
        if self.extra.scale is not None:
            self.extra.scale.set(statistics)

    def save_pretrained(self, path: Path | str) -> None:
        """Write the policy to a folder; the model or its adapters are in the folder vlm."""
        self._write_head(Path(path), self.vlm.config)
        self.vlm.save_pretrained(Path(path) / VLM_FOLDER)

    def export(self, path: Path | str) -> None:
        model = self.vlm.config
        # the exported model stands alone, without adapters and without a path to a base
        merged = dataclasses.replace(model, lora=dataclasses.replace(model.lora, enabled=False), path="", build=None)
        self._write_head(Path(path), merged)
        self.vlm.save_merged(Path(path) / VLM_FOLDER)

    def _write_head(self, folder: Path, model: ModelConfig) -> None:
        write_config(folder, "vlm", self.config, self, model=dataclasses.asdict(model))
        write_weights(self.extra, folder)

    def load_weights(self, path: Path | str) -> None:
        read_weights(self.extra, Path(path))
        self.vlm.load_weights(Path(path) / VLM_FOLDER)
        read_units(Path(path), self)

    @classmethod
    def from_model(cls, model: ModelConfig, config: VlmActionConfig) -> Self:
        """Add an action head to a vision-language model, on the CPU; `shared_prefix` is off because rows share none."""
        from mmrl.vlm.engine.vlm_policy import load_policy

        if model.router_aux_loss_coef:
            raise UserError(
                "model.router_aux_loss_coef only applies to text; a policy with an action head has no router loss"
            )
        return cls(load_policy(dataclasses.replace(model, shared_prefix=False)), config)

    @classmethod
    def from_pretrained(cls, path: Path | str, model: ModelConfig | None = None) -> Self:
        """Load a saved policy on the CPU; raises UserError if the folder is damaged or contains something else.

        `model` replaces the saved settings of the model, such as precision and LoRA, except for its path.
        """
        folder = Path(path)
        entries = read_config(folder)
        entries.pop("kind", None)
        settings = model or _model_config(entries.pop("model", {}), f"model in {folder}")
        entries.pop("model", None)
        check_sizes(entries, folder)
        config = make_config(VlmActionConfig, entries, str(folder))
        settings = dataclasses.replace(settings, path=str(folder / VLM_FOLDER), build=None)
        policy = cls.from_model(settings, config)
        read_weights(policy.extra, folder)
        read_units(folder, policy)
        return policy

    def _prompts(self, batch: PolicyInputs) -> list[Prompt]:
        from PIL import Image

        from mmrl.vlm.data.task import VlmTask

        images = [None] * len(batch) if batch.images is None else list(batch.images.cpu().numpy())
        prompts = []
        for text, pixels in zip(batch.instructions, images, strict=True):
            image = [] if pixels is None else [{"type": "image"}]
            question = self.config.prompt.format(instruction=text.lower())
            turn = {"role": "user", "content": [*image, {"type": "text", "text": question}]}
            prompts.append(self.vlm.encode(VlmTask(text, [turn]), [] if pixels is None else [Image.fromarray(pixels)]))
        return prompts


def _model_config(entries: Mapping[str, Any], place: str) -> ModelConfig:
    from mmrl.vlm.model.model_config import CriticSettings, LoraSettings, ModelConfig

    nested: dict[str, type[Any]] = {"lora": LoraSettings, "critic": CriticSettings}
    if not isinstance(entries, Mapping) or not all(isinstance(entries.get(name, {}), Mapping) for name in nested):
        raise UserError(f"{place} is {entries!r:.80}; expected an object of model settings")
    rest = {name: value for name, value in entries.items() if name != "lane"}  # of policies saved by release 0.2
    parts = {name: make_config(kind, dict(rest.pop(name, {})), f"{place}.{name}") for name, kind in nested.items()}
    return make_config(ModelConfig, rest | parts, place)


class _Extra(nn.Module):
    """Weights added to the model: the state projector and the placeholder embeddings."""

    zeros: Tensor
    project: nn.Linear | None

    def __init__(self, config: VlmActionConfig, hidden: int, tokens: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.project = nn.Linear(config.state_size, hidden) if config.state_size else None
            embeddings = torch.randn(tokens, hidden) * 0.02 if config.placeholders == "learned" else None
        self.scale = StateScale(config.state_size) if config.state_size else None
        self.learned = None if embeddings is None else nn.Parameter(embeddings)
        self.register_buffer("zeros", torch.zeros(tokens, hidden), persistent=False)

    def forward(self, batch: PolicyInputs, device: torch.device) -> Tensor:
        """(B, T, H), or (B, 1 + T, H) with the state's token in front."""
        tokens = self.zeros if self.learned is None else self.learned
        tokens = tokens.expand(len(batch), -1, -1)
        if self.project is None or self.scale is None:
            return tokens
        size = len(self.scale.mean)
        found = None if batch.state is None else batch.state.shape[1]
        if batch.state is None or found != size:
            raise UserError(f"the policy expects a state of {size} entries, got {found or 'none'}")
        state: Tensor = self.project(self.scale(batch.state.to(device)))
        # before the placeholders: attention is causal, and every action token should see the state
        return torch.cat([state[:, None].to(tokens.dtype), tokens], 1)


def _first_id(vlm: VlmPolicy, config: VlmActionConfig) -> int:
    """First id of the action tokens."""
    texts = int(vlm.processor.tokenizer.vocab_size)  # excludes the control tokens, which follow the text tokens
    rows = int(vlm.network.lm_head.weight.shape[0])
    first = texts - config.bins if config.first_id is None else config.first_id
    if first < 0 or first + config.bins > rows:
        raise UserError(
            f"bins={config.bins} with first_id={config.first_id} does not fit a vocabulary of {texts} text ids and "
            f"{rows} rows"
        )
    return first
