"""The generic lane: any image-text or language model through the public interface of transformers.

    media            get_image_features            once for each prompt, kept where the tower is frozen
    prompt           base model, empty cache       once for its group
    responses        base model, repeated cache    continuations alone

Prompts of one length share a pass, and where the cache holds the keys and values of all tokens those of similar
lengths too, padded at their end. Sliding windows, linear attention and positions counted by the model therefore need
no mask. If the cache cannot be used (gradient checkpointing while training, images inside responses,
`model.shared_prefix=false`), the prompt is read again for every response, but its media still pass the tower only once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.transfer import to_device
from mmrl.vlm.data.prompt import Prompt, leaves
from mmrl.vlm.engine.prefix import CachedPart, CachedPrefix, Prefix
from mmrl.vlm.engine.rows import Reading, joined_rows
from mmrl.vlm.families.family import family_of
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.network import vision_parameters
from mmrl.vlm.model.vision import VisionFeatures, gather_features, tower_state

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
        if len({part.shape[1:-1] for part in parts}) > 1:  # videos of unequal lengths
            return torch.cat([part.flatten(0, -2) for part in parts])[None]
        return torch.cat(list(parts))
    return [tensor for part in parts for tensor in part]


class GenericLane:
    """Arguments that a model's forward takes, and how the prompts and responses of a `VlmPolicy` are given to it."""

    def __init__(self, network: Any, config: ModelConfig) -> None:
        body = network.base_model
        self._accepted = frozenset(inspect.signature(body.forward).parameters)
        self._cache_name = cache_argument(body)
        self._axes = hasattr(body, "get_rope_index")  # positions along three axes, which are always given
        self._family = family_of(network.config.model_type)
        self._config = config
        from mmrl.vlm.engine.cache import is_plain, new_cache

        self.pads = is_plain(new_cache(network.config)) and {"attention_mask", "position_ids"} <= self._accepted
        """Whether prompts may be padded: the cache holds the keys and values of all tokens, and nothing else."""

    @property
    def trains_shared(self) -> bool:
        """Whether a prompt is computed once for its group while training too."""
        return self._config.shared_prefix and not self._config.gradient_checkpointing

    def shares(self, policy: Any) -> bool:
        """Whether a prompt is computed once for its group now."""
        return self._config.shared_prefix if not policy.training else self.trains_shared

    def states(self, policy: Any, reading: Reading) -> Tensor:
        """States (M, H) before the scored tokens.

        Gradient: flows into all trainable weights.
        """
        if (reading.inserts and policy.reads_media) or not self.shares(policy):
            return self._flat_states(policy, reading)
        device, group = policy.device, reading.group
        prefix = policy.prefixes.get(reading.prompts, reading.view)
        policy.routes.add_prompts(prefix.routes, reading)
        found: list[Tensor] = []
        last = torch.zeros(len(reading.prompts), dtype=torch.int64, device=device)  # place of each prompt's last state
        first = torch.zeros(len(group), dtype=torch.int64, device=device)  # place of each row's first own state
        count = 0
        for part in prefix.parts:
            found.append(part.last_state)
            last[part.numbers] = count + torch.arange(len(part.numbers), device=device)
            count += len(part.numbers)
            local, row = torch.nonzero(part.numbers[:, None] == group, as_tuple=True)
            width = int(reading.lengths[row].max()) if len(row) else 0
            if not width:
                continue
            real = torch.arange(width, device=device) < reading.lengths[row][:, None]
            tokens = reading.tokens[row, :width].where(real, policy.pad_id)
            if reading.mixed:
                tokens = mixed_embeddings(policy, tokens, {key: x[row, :width] for key, x in reading.mixed.items()})
            with policy.routes.watch():
                found.append(self.advance(policy, tokens, part.select(local)).flatten(0, 1))
            policy.routes.add(real.flatten())
            first[row] = count + width * torch.arange(len(row), device=device)
            count += width * len(row)
        row, step = reading.row, reading.step
        # the first token of a row is predicted by the prompt's last state, which the group shares
        return torch.cat(found)[torch.where(step == 0, last[group[row]], first[row] + step - 1)]

    def last_states(self, policy: Any, prompts: Sequence[Prompt]) -> Tensor:
        """States (N, H) of the last tokens of N prompts."""
        ends = torch.tensor([len(prompt) for prompt in prompts], device=policy.device)
        return self.read(policy, prompts)[torch.arange(len(prompts), device=policy.device), ends - 1]

    def encode_prefix(self, policy: Any, prompts: Sequence[Prompt]) -> CachedPrefix:
        """Read each of N prompts once, batching those of similar lengths.

        Gradient: flows into all trainable weights.
        """
        from mmrl.vlm.engine.cache import new_cache

        def column(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, device=policy.device)

        parts = []
        for numbers in self.together(prompts):
            cache, some = new_cache(policy.network.config), [prompts[number] for number in numbers]
            lengths = column([len(prompt) for prompt in some])
            width = int(lengths.max())
            found = torch.arange(width, device=policy.device) < lengths[:, None]
            real = None if bool(found.all()) else found
            with policy.routes.watch():
                states = self.read(policy, some, cache=cache, real=real)
            own = torch.arange(len(some), device=policy.device)[:, None].expand(found.shape).where(found, -1)
            last = states[torch.arange(len(some), device=policy.device), lengths - 1]
            position = column([prompt.next_position for prompt in some])
            routes = policy.routes.sums(own.flatten(), len(some))
            parts.append(CachedPart(column(numbers), cache, lengths, position, last, real, routes))
        return CachedPrefix(parts)

    def together(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Indices of prompts that share a pass: of equal length, or with a little padding if the cache allows it."""
        lengths = [len(prompt) for prompt in prompts]
        order, chosen = sorted(range(len(prompts)), key=lengths.__getitem__), list[int]()
        waste = MOST_PADDING if self.pads else 0.0
        for number in order:
            real = sum(lengths[one] for one in chosen) + lengths[number]
            if chosen and lengths[number] * (len(chosen) + 1) > (1 + waste) * real:
                yield chosen
                chosen = []
            chosen.append(number)
        yield chosen

    def read_behind(
        self, policy: Any, before: Prefix, parts: Sequence[Prompt]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """States (b, t, H) of parts, each after its own history, and keys and values (b, Hk, t, d) by layer."""
        from mmrl.vlm.engine.cache import filled_cache

        width, lengths = before.keys[0].shape[2], torch.tensor([len(part) for part in parts], device=policy.device)
        own = torch.arange(int(lengths.max()), device=policy.device) < lengths[:, None]
        past = to_device(torch.arange(width) < before.lengths[:, None], policy.device)
        cache: Any = filled_cache(policy.network.config, before.keys, before.values)
        real = torch.cat([past, own], 1)
        states = self.read(policy, parts, cache=cache, real=real, start=to_device(before.next_position, policy.device))
        return states, [(layer.keys[:, :, width:], layer.values[:, :, width:]) for layer in cache.layers]

    def read(
        self,
        policy: Any,
        prompts: Sequence[Prompt],
        *,
        begun: Tensor | None = None,
        cache: Any = None,
        real: Tensor | None = None,
        start: Tensor | None = None,
    ) -> Tensor:
        """States (N, L, H) of N prompts, padded at the end.

        Args:
            policy: whose model reads them.
            prompts: they may be whole rows.
            begun: (N,) tokens before the response, where they are.
            cache: it keeps their keys and values behind those that it has.
            real: (N, C) False on the padding of the cache; None without.
            start: (N,) positions of the first tokens; None is 0.
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
        inputs: dict[str, Any] = {} if real is None else {"attention_mask": real.long()}
        inputs |= self._family.token_inputs(types.to(device), is_prompt, self._accepted)
        if features := self._features(policy, prompts):
            inputs["mm_encoder_outputs"] = features
        positions = positions.to(device)
        if start is not None:
            positions = positions + start[:, None]
        if self._axes or start is not None:
            inputs["position_ids"] = positions if self._axes else positions[0]
        return self._run(policy, ids.to(device), cache, **inputs)

    def advance(self, policy: Any, tokens: Tensor, part: CachedPart) -> Tensor:
        """States (b, t, H) of tokens (b, t), or embeddings (b, t, H), behind what a part holds, which then has them."""
        inputs: dict[str, Any] = {}
        positions = part.next_position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        if self._axes:
            inputs["position_ids"] = positions.expand(3, -1, -1)
        if part.real is not None:
            part.real = functional.pad(part.real, (0, tokens.shape[1]), value=True)
            inputs |= {"attention_mask": part.real.long()} | ({} if self._axes else {"position_ids": positions})
        part.next_position = part.next_position + tokens.shape[1]
        return self._run(policy, tokens, part.cache, **inputs)

    def _run(self, policy: Any, ids: Tensor, cache: Any, **inputs: Any) -> Tensor:
        inputs |= {"use_cache": False} if cache is None else {"use_cache": True, self._cache_name: cache}
        read = {"inputs_embeds" if ids.is_floating_point() else "input_ids": ids}
        output = policy.network.base_model(**read, return_dict=True, **inputs)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _flat_states(self, policy: Any, reading: Reading) -> Tensor:
        """States before the scored tokens, every row with a separate prompt."""
        begun = torch.tensor([len(prompt) for prompt in reading.prompts], device=policy.device)[reading.group]
        with policy.routes.watch():
            hidden = self.read(policy, joined_rows(reading), begun=begun)
        policy.routes.add_rows(hidden, begun, reading)
        return hidden[reading.row, begun[reading.row] - 1 + reading.step]

    def _features(self, policy: Any, prompts: Sequence[Prompt]) -> dict[str, MediaFeatures]:
        """Features of all media in the order of their tokens, by kind."""
        if policy.generic is None:  # the fast lane keeps them in another form
            return _as_media(gather_features(policy.network.model, prompts, policy.features), prompts)
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


def mixed_embeddings(policy: Any, tokens: Tensor, mixed: Mapping[str, Tensor]) -> Tensor:
    """Embeddings (..., H), without gradient, of tokens (...), or of mixtures where `soft` (...) is not 0.

    A mixture is of tokens `ids` (..., K) with the weights `weights` (..., K).
    """
    embed = policy.network.get_input_embeddings()
    with torch.no_grad():
        whole, parts = embed(tokens), embed(mixed["ids"])
        blend = (mixed["weights"][..., None].to(parts.dtype) * parts).sum(-2)
        return torch.where(mixed["soft"][..., None] > 0, blend, whole)


def _as_media(found: VisionFeatures | None, prompts: Sequence[Prompt]) -> dict[str, MediaFeatures]:
    """The fast lane's features by kind."""
    if found is None:
        return {}
    types = torch.cat([prompt.mm_token_type_ids for prompt in prompts])
    places = {kind: torch.nonzero(types[types > 0] == number + 1).flatten() for number, kind in enumerate(KINDS)}
    some = {kind: found.select(index.to(found.tokens.device)) for kind, index in places.items() if len(index)}
    return {
        kind: MediaFeatures([one.tokens], [[level] for level in one.deepstack] or None) for kind, one in some.items()
    }


def cache_argument(model: Any) -> str:
    """Name of the cache among the arguments of a model's forward; transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class GenericDecoder:
    """Rows that are decoded together; `part` are their prompts, one a row, in a cache that is theirs."""

    def __init__(self, policy: Any, lane: GenericLane, part: CachedPart) -> None:
        self._policy, self._lane, self._part = policy, lane, part

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self._part = self._part.select(to_device(index, self._part.lengths.device))

    def advance(self, token: Tensor) -> Tensor:
        """Read one token (b,), or embedding (b, H), of each row; returns the states (b, H) that predict the next."""
        return self._lane.advance(self._policy, token[:, None], self._part)[:, -1]

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self._policy.next_logp(states, temperature)  # type: ignore[no-any-return]


MOST_PADDING = 0.25
"""Largest share of padding, in tokens of prompts, at which prompts of unequal lengths pass the model together."""
