"""The generic lane: any image-text or language model through the public interface of transformers.

    media            get_image_features            once for each prompt, kept where the tower is frozen
    prompt           base model, empty cache       once for its group
    responses        base model, repeated cache    continuations alone

Prompts of one length share a pass, so nothing is padded in front of a response, and sliding windows, linear attention
and positions that a model counts by itself need no mask. Where the cache cannot be used (gradient checkpointing while
training, images inside responses, `model.shared_prefix=false`) every response is read behind its own prompt; its media
pass the tower once all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.vlm.data.prompt import Prompt, leaves
from mmrl.vlm.engine.rows import Reading, joined_rows
from mmrl.vlm.families.family import family_of
from mmrl.vlm.model.config import ModelConfig
from mmrl.vlm.model.network import vision_parameters
from mmrl.vlm.model.vision import tower_state

KINDS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Kinds of media, and the argument without which a prompt has none of a kind."""


@dataclass(frozen=True)
class MediaFeatures:
    """Features of images or videos as a model's forward reads them from `mm_encoder_outputs`."""

    pooler_output: Any
    """Replacements of the placeholder embeddings: a tensor, or one (n, H) for each image."""
    deepstack_features: Any = None
    """The same for each of several decoder layers (Qwen3-VL)."""

    @staticmethod
    def join(parts: Sequence[MediaFeatures]) -> MediaFeatures:
        """Features of all parts, one after another."""
        levels = [part.deepstack_features for part in parts if part.deepstack_features is not None]
        deepstack = [_joined(level) for level in zip(*levels, strict=True)] if levels else None
        return MediaFeatures(_joined([part.pooler_output for part in parts]), deepstack)


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return [tensor for part in parts for tensor in part]


class GenericLane:
    """What a model's forward takes, and how the prompts and responses of a `VlmPolicy` are given to it."""

    def __init__(self, network: Any, config: ModelConfig) -> None:
        body = network.base_model
        self._accepted = frozenset(inspect.signature(body.forward).parameters)
        self._cache_name = cache_argument(body)
        self._positions_given = hasattr(body, "get_rope_index")
        self._family = family_of(network.config.model_type)
        self._config = config
        if hasattr(body, "get_image_features") and "mm_encoder_outputs" not in self._accepted:
            raise UserError(
                f"{type(body).__name__} takes no mm_encoder_outputs, which the generic lane gives it; models of "
                f"type {network.config.model_type} need a newer transformers"
            )

    def shares(self, policy: Any) -> bool:
        """Whether a prompt is computed once for its group now."""
        recomputed = self._config.gradient_checkpointing and policy.training
        return self._config.shared_prefix and not recomputed

    def states(self, policy: Any, reading: Reading) -> Tensor:
        """States (M, H) before the scored tokens.

        Gradient: flows into all trainable weights.
        """
        if reading.inserts or not self.shares(policy):
            return self._flat_states(policy, reading)
        device, group = policy.device, reading.group
        rows_left = torch.bincount(group, minlength=len(reading.prompts)).tolist()
        found: list[Tensor] = []
        last = torch.zeros(len(reading.prompts), dtype=torch.int64, device=device)  # place of each prompt's last state
        first = torch.zeros(len(group), dtype=torch.int64, device=device)  # place of each row's first own state
        count = 0
        for chosen in _of_one_length(reading.prompts, [number for number, rows in enumerate(rows_left) if rows]):
            cache = self.new_cache(policy)
            numbers = torch.tensor(chosen, device=device)
            prompts = [reading.prompts[number] for number in chosen]
            found.append(self.read(policy, prompts, cache=cache)[:, -1])
            last[numbers] = count + torch.arange(len(chosen), device=device)
            count += len(chosen)
            local, row = torch.nonzero(numbers[:, None] == group, as_tuple=True)
            width = int(reading.lengths[row].max())
            if not width:
                continue
            cache.batch_select_indices(local)
            real = torch.arange(width, device=device) < reading.lengths[row][:, None]
            tokens = reading.tokens[row, :width].where(real, policy.pad_id)
            start = torch.tensor([prompt.next_position for prompt in prompts], device=device)[local]
            found.append(self.advance(policy, tokens, start, cache).flatten(0, 1))
            first[row] = count + width * torch.arange(len(row), device=device)
            count += width * len(row)
        row, step = reading.row, reading.step
        # the first token of a row is predicted by the prompt's last state, which the group shares
        return torch.cat(found)[torch.where(step == 0, last[group[row]], first[row] + step - 1)]

    def last_states(self, policy: Any, prompts: Sequence[Prompt]) -> Tensor:
        """States (N, H) of the last tokens of N prompts."""
        ends = torch.tensor([len(prompt) for prompt in prompts], device=policy.device)
        return self.read(policy, prompts)[torch.arange(len(prompts), device=policy.device), ends - 1]

    def new_cache(self, policy: Any) -> Any:
        """An empty cache."""
        from mmrl.vlm.engine.cache import new_cache

        return new_cache(policy.network.config)

    def read(self, policy: Any, prompts: Sequence[Prompt], *, begun: Tensor | None = None, cache: Any = None) -> Tensor:
        """States (N, L, H) of N prompts, padded at the end; with a `cache`, which they fill, all have one length.

        `begun` (N,) are the tokens before the response, where prompts are whole rows.
        """
        device, size = policy.device, (len(prompts), max(len(prompt) for prompt in prompts))
        ids = torch.full(size, policy.pad_id)
        types = torch.zeros(size, dtype=torch.int64)
        positions = torch.zeros((3, *size), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt.input_ids
            types[row, : len(prompt)] = prompt.mm_token_type_ids
            positions[:, row, : len(prompt)] = prompt.position_ids
        is_prompt = torch.ones(size, dtype=torch.bool, device=device)
        if begun is not None:
            is_prompt = torch.arange(size[1], device=device) < begun[:, None]
        inputs = self._family.token_inputs(types.to(device), is_prompt, self._accepted)
        if features := self._features(policy, prompts):
            inputs["mm_encoder_outputs"] = features  # type: ignore[assignment]
        return self._run(policy, ids.to(device), positions.to(device), cache, **inputs)

    def advance(self, policy: Any, tokens: Tensor, start: Tensor, cache: Any) -> Tensor:
        """States (b, t, H) of tokens (b, t) behind what the cache holds; `start` (b,) are their first positions."""
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return self._run(policy, tokens, positions.expand(3, -1, -1), cache)

    def _run(self, policy: Any, ids: Tensor, positions: Tensor, cache: Any, **inputs: Any) -> Tensor:
        if self._positions_given:
            inputs["position_ids"] = positions
        inputs |= {"use_cache": False} if cache is None else {"use_cache": True, self._cache_name: cache}
        output = policy.network.base_model(input_ids=ids, return_dict=True, **inputs)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _flat_states(self, policy: Any, reading: Reading) -> Tensor:
        """States before the scored tokens, every row with a separate prompt."""
        begun = torch.tensor([len(prompt) for prompt in reading.prompts], device=policy.device)[reading.group]
        hidden = self.read(policy, joined_rows(reading), begun=begun)
        return hidden[reading.row, begun[reading.row] - 1 + reading.step]

    def _features(self, policy: Any, prompts: Sequence[Prompt]) -> dict[str, MediaFeatures]:
        """Features of all media in the order of their tokens, by kind."""
        parts = [leaf for prompt in prompts for leaf in leaves(prompt) if leaf.media]
        if not parts:
            return {}
        tower = vision_parameters(policy.network)
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in tower):
            policy.features.clear()
            made = {part: self._encode(policy, part) for part in dict.fromkeys(parts)}
            found = [made[part] for part in parts]
        else:
            state = tower_state(policy.network.modules(), tower)
            found = policy.features.gather(state, parts, lambda some: [self._encode(policy, part) for part in some])
        kinds = [kind for kind in KINDS if any(kind in features for features in found)]
        return {kind: MediaFeatures.join([some[kind] for some in found if kind in some]) for kind in kinds}

    def _encode(self, policy: Any, prompt: Prompt) -> dict[str, MediaFeatures]:
        """Features of a prompt's own media."""
        body, made = policy.network.base_model, {}
        for kind in (kind for kind, pixels in KINDS.items() if pixels in prompt.media):
            encode = getattr(body, f"get_{kind}_features")
            names = inspect.signature(encode).parameters.keys() & prompt.media.keys()
            media = {name: prompt.media[name].to(policy.device) for name in names}
            floats = {name: value.to(body.dtype) for name, value in media.items() if value.is_floating_point()}
            output = encode(**(media | floats), return_dict=True)
            made[kind] = MediaFeatures(output.pooler_output, getattr(output, "deepstack_features", None))
        return made


def cache_argument(model: Any) -> str:
    """Name of the cache among the arguments of a model's forward; transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _of_one_length(prompts: Sequence[Prompt], numbers: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of prompts, those of one length together."""
    lengths: dict[int, list[int]] = {}
    for number in numbers:
        lengths.setdefault(len(prompts[number]), []).append(number)
    yield from lengths.values()


class GenericDecoder:
    """Rows behind prompts of one length that are decoded together; `prompt` (b,) is the prompt of each row."""

    def __init__(self, policy: Any, lane: GenericLane, prompts: Sequence[Prompt], prompt: Tensor, cache: Any) -> None:
        self._policy, self._lane, self._cache = policy, lane, cache
        cache.batch_select_indices(prompt)
        self._next = torch.tensor([one.next_position for one in prompts], device=prompt.device)[prompt]

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self._cache.batch_select_indices(index)
        self._next = self._next[index]

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""
        states = self._lane.advance(self._policy, token[:, None], self._next, self._cache)[:, -1]
        self._next = self._next + 1
        return states

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self._policy.next_logp(states, temperature)  # type: ignore[no-any-return]


def prompts_together(prompts: Sequence[Prompt], most: int) -> Iterator[list[int]]:
    """Numbers of prompts that are read in one pass: of one length, at most `most`."""
    for chosen in _of_one_length(prompts, range(len(prompts))):
        yield from (chosen[first : first + most] for first in range(0, len(chosen), most))
