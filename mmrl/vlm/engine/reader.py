"""How a transformers model reads prompts and responses: its own forward, and one pass of the vision tower.

    media            get_image_features            once for each prompt, kept where the tower is frozen
    prompts          base model                    once for their groups
    responses        base model                    continuations alone

**Joined.** Models whose layers all attend through transformers' attention interface get the layout of the rows as the
argument `shared`, which their layers hand to `mmrl.vlm.engine.attention`: all prompts pass end to end in one row, all
responses in another, and every response attends to the keys and values of its prompt, which exist once for the group.

**Cached.** Models with sliding windows, linear attention or other states read prompts into a cache of transformers,
which is copied for every response. Prompts of one length share a pass, and where the cache holds the keys and values of
all tokens those of similar lengths too, padded at their end.

Where neither is possible (`model.shared_prefix=false`; a cache with gradient checkpointing while training, or with
images inside responses), the prompt is read again for every response, but its media still pass the tower only once.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.payload import sum_of_bits, take_rows, to_device
from mmrl.vlm.data.prompt import Prompt, leaves
from mmrl.vlm.engine.attention import ATTENTION_NAME, KeepingRow, PromptRow, ResponseRow, prompt_index, response_index
from mmrl.vlm.engine.capabilities import joining_problem, reads_images, replaying_problem
from mmrl.vlm.engine.prefix import CachedPart, Prefix
from mmrl.vlm.engine.rows import PackedRows, Reading, joined_rows, pack_prompts, pack_reading
from mmrl.vlm.families.family import family_of
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.network import vision_parameters


def weights_state(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """One number per trainable weight, plus one for all, that change whenever a weight changes.

    A parameter's `_version` counts writes, but not those of a fused optimiser. So weights that an optimiser may move
    are read: the sum of their bits, eight bytes at a time, which is exact, needs no order of summation and takes as
    long as reading them once (about 0.3 ms for a million float32 on one core of a desktop's CPU).
    """
    weights = list(parameters)
    trained = [weight for weight in weights if weight.requires_grad or weight.grad is not None]
    versions = sum(weight._version for weight in weights)
    if not trained:
        return (versions,)
    sums = torch.stack([sum_of_bits(weight.detach()).to(trained[0].device) for weight in trained])
    return (versions, *sums.tolist())


class _PatchProduct(nn.Conv3d):
    """A convolution whose kernel covers its whole input, computed as one (faster) matrix product."""

    def forward(self, patches: Tensor) -> Tensor:
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        product = functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product[..., None, None, None]


def multiply_patches(tower: Any) -> None:
    """Compute the patch embedding of a vision tower as a matrix product; weights and names are unchanged."""
    if type(tower.patch_embed.proj) is nn.Conv3d:
        tower.patch_embed.proj.__class__ = _PatchProduct


class FeatureCache:
    """Cache of vision tower features, valid as long as the weights and the prompts exist unchanged."""

    def __init__(self) -> None:
        self._features: weakref.WeakKeyDictionary[Prompt, Any] = weakref.WeakKeyDictionary()
        self._weights: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureCache:
        """A copied policy starts with an empty cache: its tower may be trained or moved on its own."""
        return FeatureCache()

    def __len__(self) -> int:
        return len(self._features)

    def clear(self) -> None:
        """Forget everything."""
        self._features.clear()

    def gather(
        self, weights: tuple[int, ...], prompts: Sequence[Prompt], encode: Callable[[Sequence[Prompt]], Sequence[Any]]
    ) -> list[Any]:
        """Features of each prompt that contains media; only those not seen before are encoded.

        `weights` changes with the weights of the tower: by a reload, or a moving average.
        """
        if weights != self._weights:
            self._features.clear()
            self._weights = weights
        missing = list(dict.fromkeys(p for p in prompts if p.media and p not in self._features))
        if missing:
            with torch.no_grad():
                self._features.update(zip(missing, encode(missing), strict=True))
        return [self._features[prompt] for prompt in prompts if prompt.media]


def tower_state(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """`weights_state` of a tower, and whether its adapters are switched off for a while."""
    switches = (getattr(module, "disable_adapters", None) for module in modules)  # a method of whole models
    return (*weights_state(parameters), *(switch for switch in switches if isinstance(switch, bool)))


LOGGER = logging.getLogger("mmrl")
COPIED = (
    "prompts are read once, but every response has its own copy of the prompt's keys and values, which takes "
    "samples_per_task times the memory: %s"
)
"""What it costs, and why, if responses do not attend to a shared prompt."""
KINDS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Kinds of media, and the argument whose absence means that a prompt has none of that kind."""


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

    def split(self, counts: Sequence[int]) -> Iterator[MediaFeatures]:
        """Features of as many images or videos as each of `counts`, of a model that lists them."""
        for stop, count in zip(accumulate(counts), counts, strict=True):
            own = slice(stop - count, stop)
            levels = None if self.deepstack_features is None else [level[own] for level in self.deepstack_features]
            yield MediaFeatures(self.pooler_output[own], levels)


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        if len({part.shape[1:-1] for part in parts}) > 1:  # videos of unequal lengths
            return torch.cat([part.flatten(0, -2) for part in parts])[None]
        return torch.cat(list(parts))
    return [tensor for part in parts for tensor in part]


class ModelReader:
    """Arguments of a model's forward, and how the prompts and responses of a `VlmPolicy` are passed to it."""

    def __init__(self, network: Any, config: ModelConfig) -> None:
        body = network.base_model
        accepted = frozenset(inspect.signature(body.forward).parameters)
        # without images, such as in GPT-2, the types are of segments, and passing them adds an embedding
        self._accepted = accepted if reads_images(type(network), network.config) else accepted - {"token_type_ids"}
        self._cache_name = cache_argument(body)
        self._axes = hasattr(body, "get_rope_index")  # positions along three axes, which are always given
        self._family = family_of(network.config.model_type)
        self._config = config
        from mmrl.vlm.engine.cache import is_plain, new_cache

        self.pads = is_plain(new_cache(network.config)) and {"attention_mask", "position_ids"} <= self._accepted
        """Whether prompts may be padded: the cache holds the keys and values of all tokens, and nothing else."""
        self._replays: bool | None = None
        self._joins: bool | None = None
        if not self.pads or "token_type_ids" in self._accepted or not config.shared_prefix:
            self._joins = False
        if network.config.get_text_config()._attn_implementation != ATTENTION_NAME:
            self._joins = False

    def joins(self, policy: Any) -> bool:
        """Whether responses attend to their group's prompt without a copy; tested once on a few text tokens."""
        if self._joins is None:
            self._joins = True  # for the attempt
            problem = joining_problem(policy, self)
            self._joins = problem is None
            if problem is not None:
                LOGGER.info(COPIED, problem)
                # the model's own again: layers of some families look for it by name, such as Falcon's
                policy.network.config.get_text_config()._attn_implementation = self._config.attention
        return self._joins

    def replays(self, policy: Any) -> bool:
        """Whether the step of a token is replayed as a CUDA graph on a GPU; tested once on a few text tokens."""
        if policy.device.type != "cuda" or not torch.cuda.is_available():
            return False
        if self._replays is None:
            problem = replaying_problem(policy, self)
            if problem is not None:
                self.refuse_replays(problem)
            self._replays = self._replays is None  # a capture that fails refuses them too
        return self._replays

    def refuse_replays(self, problem: str) -> None:
        """Decode without graphs from now on."""
        if self._replays is not False:
            LOGGER.info("tokens are decoded without a CUDA graph: %s", problem)
        self._replays = False

    def trains_shared(self, policy: Any) -> bool:
        """Whether a prompt is also computed once for its group during training."""
        return self._config.shared_prefix and (not self._config.gradient_checkpointing or self.joins(policy))

    def shares(self, policy: Any) -> bool:
        """Whether a prompt is computed once for its group now."""
        return self._config.shared_prefix if not policy.training else self.trains_shared(policy)

    def states(self, policy: Any, reading: Reading) -> Tensor:
        """States (M, H) before the scored tokens.

        Gradient: flows into all trainable weights.
        """
        # with one response a prompt there is nothing to share, and a flat row saves the separate pass; but an open
        # scope may bring further micro-batches of the group
        alone = len(reading.lengths) <= len(reading.prompts) and not (policy.prefixes.is_open or reading.mixed)
        copied = reading.inserts and policy.reads_media and not self.joins(policy)
        if alone or copied or not self.shares(policy):
            return self._flat_states(policy, reading)
        prefix = policy.prefixes.get(reading.prompts, reading.view)
        policy.routes.add_prompts(prefix.routes, reading)
        read = self._joined_states if self.joins(policy) else self._cached_states
        # states of all parts end to end: of each part its prompts' last states, then its rows' own states
        found: list[Tensor] = []
        prompt_state_at = torch.zeros(len(reading.prompts), dtype=torch.int64)
        row_starts_at = torch.zeros(len(reading.host_group), dtype=torch.int64)
        count = 0
        for part in prefix.parts:
            # packed prompts are in order, also after `select`, so a GPU need not be asked
            in_order = len(prefix.parts) == 1 and self.joins(policy)
            numbers = torch.arange(len(part.numbers)) if in_order else part.numbers.cpu()
            found.append(part.last_state)
            prompt_state_at[numbers] = count + torch.arange(len(numbers))
            count += len(numbers)
            local, row = torch.nonzero(numbers[:, None] == reading.host_group, as_tuple=True)
            if not len(row) or not int(reading.host_lengths[row].max()):
                continue
            states, starts = read(policy, reading, part, local, row)
            found.append(states)
            row_starts_at[row] = count + starts
            count += len(states)
        prompt_state_at = to_device(prompt_state_at, policy.device)
        row_starts_at = to_device(row_starts_at, policy.device)
        row, step = reading.row, reading.step
        # the first token of a row is predicted by the prompt's last state, which the group shares
        place = torch.where(step == 0, prompt_state_at[reading.group[row]], row_starts_at[row] + step - 1)
        return take_rows(torch.cat(found), place)

    def _joined_states(
        self, policy: Any, reading: Reading, part: CachedPart, local: Tensor, row: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States (m, H) of the rows `row` (n,) behind the prompts `local` (n,) of a part, and where each row starts."""
        lengths = reading.host_lengths[row]
        index = response_index(lengths, local, len(part.numbers), policy.device)
        layers = part.cache.layers
        shared = ResponseRow(index, part.real, [one.keys for one in layers], [one.values for one in layers])
        inserts = [insert.prompt for number in row.tolist() if reading.inserts for insert in reading.inserts[number]]
        with policy.routes.watch():
            states = self.read_packed(policy, pack_reading(reading, row, policy.device), inserts, shared)
        policy.routes.add(torch.ones(len(states), dtype=torch.bool, device=policy.device))
        return states, lengths.cumsum(0) - lengths

    def _cached_states(
        self, policy: Any, reading: Reading, part: CachedPart, local: Tensor, row: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same behind copies of the part's cache, with padding between the rows."""
        width, device = int(reading.host_lengths[row].max()), policy.device
        local, rows = to_device(local, device), to_device(row, device)
        real = torch.arange(width, device=device) < reading.lengths[rows][:, None]
        tokens = reading.tokens[rows, :width].where(real, policy.pad_id)
        if reading.mixed:
            tokens = mixed_embeddings(policy, tokens, {key: x[rows, :width] for key, x in reading.mixed.items()})
        with policy.routes.watch():
            states = self.advance(policy, tokens, part.select(local)).flatten(0, 1)
        policy.routes.add(real.flatten())
        return states, width * torch.arange(len(row))

    def last_states(self, policy: Any, prompts: Sequence[Prompt]) -> Tensor:
        """States (N, H) of the last tokens of N prompts."""
        ends = torch.tensor([len(prompt) for prompt in prompts], device=policy.device)
        return self.read(policy, prompts)[torch.arange(len(prompts), device=policy.device), ends - 1]

    def encode_prefix(self, policy: Any, prompts: Sequence[Prompt]) -> Prefix:
        """Read each of N prompts once, batching those of similar lengths.

        Gradient: flows into all trainable weights.
        """
        from mmrl.vlm.engine.cache import new_cache

        if self.joins(policy):
            return Prefix([self._encode_packed(policy, prompts)])

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
        return Prefix(parts)

    def _encode_packed(self, policy: Any, prompts: Sequence[Prompt]) -> CachedPart:
        """Read N prompts end to end in one row, without padding."""
        from mmrl.vlm.engine.cache import filled_cache

        device, sizes = policy.device, torch.tensor([len(prompt) for prompt in prompts])
        index = prompt_index(sizes, device)
        shared = PromptRow(index)
        # attention writes the keys and values of each layer into `shared` during this forward
        with policy.routes.watch():
            states = self.read_packed(policy, pack_prompts(prompts, device), prompts, shared)
        owner = to_device(torch.arange(len(prompts)).repeat_interleave(sizes), device)
        layers = range(len(shared.keys))
        return CachedPart(
            numbers=torch.arange(len(prompts), device=device),
            cache=filled_cache(
                policy.network.config,
                [shared.keys[layer] for layer in layers],
                [shared.values[layer] for layer in layers],
            ),
            lengths=to_device(sizes, device),
            next_position=to_device(torch.tensor([prompt.next_position for prompt in prompts]), device),
            last_state=states[to_device(sizes.cumsum(0) - 1, device)],
            real=index.real,
            routes=policy.routes.sums(owner, len(prompts)),
        )

    def read_packed(
        self, policy: Any, rows: PackedRows, prompts: Sequence[Prompt], shared: PromptRow | ResponseRow | None
    ) -> Tensor:
        """States (M, H) of packed rows, whose media are those of some prompts in order."""
        own = torch.ones_like(rows.types, dtype=torch.bool)
        inputs: dict[str, Any] = dict(self._family.token_inputs(rows.types, own, self._accepted))
        if features := self._features(policy, prompts):
            inputs["mm_encoder_outputs"] = features
        tokens = mixed_embeddings(policy, rows.ids, rows.mixed) if rows.mixed else rows.ids
        return self.run_shared(policy, tokens, rows.positions, shared, **inputs)[0]

    def run_shared(self, policy: Any, tokens: Tensor, positions: Tensor, shared: Any, **inputs: Any) -> Tensor:
        """States (b, L, H) of tokens (b, L), or embeddings (b, L, H), whose layers attend through `shared`."""
        inputs["position_ids"] = positions if self._axes else positions[0]
        if not self._axes:
            # a prepared mask keeps transformers from building one of M x M, which `shared` would not read, and from
            # waiting for a GPU to say whether a row holds several texts
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=policy.device)
        return self._run(policy, tokens, None, shared=shared, **inputs)

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
        self, policy: Any, before: CachedPart, parts: Sequence[Prompt]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Last states (b, H) of parts, each after its own history, and keys and values (b, Hk, t, d) by layer."""
        device, sizes = policy.device, torch.tensor([len(part) for part in parts])
        index = response_index(sizes, torch.arange(len(parts)), len(parts), device)
        layers = before.cache.layers
        shared = KeepingRow(index, before.real, [one.keys for one in layers], [one.values for one in layers])
        packed = pack_prompts(parts, device)
        # the size is known here; from the device it would be waited for
        starts = before.next_position.repeat_interleave(to_device(sizes, device), output_size=int(sizes.sum()))
        packed.positions = packed.positions + starts
        states = self.read_packed(policy, packed, parts, shared)
        own = [tuple(index.gather(x)[:, 0].transpose(1, 2) for x in pair) for pair in shared.own]
        return states[to_device(sizes.cumsum(0) - 1, device)], own  # type: ignore[return-value]

    def read(
        self,
        policy: Any,
        prompts: Sequence[Prompt],
        *,
        begun: Tensor | None = None,
        cache: Any = None,
        real: Tensor | None = None,
        tail: Tensor | None = None,
    ) -> Tensor:
        """States (N, L, H) of N prompts, padded at the end.

        Args:
            policy: whose model reads them.
            prompts: they may be whole rows.
            begun: (N,) tokens before the response, where they are.
            cache: it keeps their keys and values behind those that it has.
            real: (N, C) False on the padding of the cache; None without.
            tail: (N, E, H) embeddings to read instead of those of the last tokens of each prompt.
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
        inputs |= self._family.token_inputs(to_device(types, device), is_prompt, self._accepted)
        if features := self._features(policy, prompts):
            inputs["mm_encoder_outputs"] = features
        if self._axes:
            inputs["position_ids"] = to_device(positions, device)
        tokens = to_device(ids, device)
        if tail is not None:
            ends = to_device(torch.tensor([len(prompt) for prompt in prompts]), device)
            each = torch.arange(size[0], device=device)[:, None]
            column = ends[:, None] - tail.shape[1] + torch.arange(tail.shape[1], device=device)
            embeddings = policy.network.get_input_embeddings()(tokens)
            tokens = embeddings.index_put((each, column), tail.to(embeddings.dtype))
        return self._run(policy, tokens, cache, **inputs)

    def advance(self, policy: Any, tokens: Tensor, part: CachedPart, *, fixed: bool = False) -> Tensor:
        """States (b, t, H) of tokens (b, t), or embeddings (b, t, H), after a part's contents; they are appended to it.

        With `fixed`, the part is of `CachedPart.fixed`, and keeps its memory.
        """
        inputs: dict[str, Any] = {}
        positions = part.next_position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        # those of padding, and of rows that have ended, may lie beyond the model's
        positions = positions.clamp(max=policy.positions - 1)
        if self._axes:
            inputs["position_ids"] = positions.expand(3, -1, -1)
        if part.real is not None:
            if not fixed:
                part.real = functional.pad(part.real, (0, tokens.shape[1]), value=True)
            inputs |= {"attention_mask": part.real.long()} | ({} if self._axes else {"position_ids": positions})
        part.next_position.add_(tokens.shape[1])
        return self._run(policy, tokens, part.cache, **inputs)

    def _run(self, policy: Any, ids: Tensor, cache: Any, **inputs: Any) -> Tensor:
        inputs |= {"use_cache": False} if cache is None else {"use_cache": True, self._cache_name: cache}
        read = {"inputs_embeds" if ids.is_floating_point() else "input_ids": ids}
        output = policy.network.base_model(**read, return_dict=True, **inputs)
        return output.last_hidden_state

    def _flat_states(self, policy: Any, reading: Reading) -> Tensor:
        """States before the scored tokens, every row with a separate prompt."""
        begun = to_device(torch.tensor([len(prompt) for prompt in reading.prompts]), policy.device)[reading.group]
        with policy.routes.watch():
            hidden = self.read(policy, joined_rows(reading), begun=begun)
        policy.routes.add_rows(hidden, begun, reading)
        return hidden[reading.row, begun[reading.row] - 1 + reading.step]

    def _features(self, policy: Any, prompts: Sequence[Prompt]) -> dict[str, MediaFeatures]:
        """Features of all media in the order of their tokens, by kind."""
        parts = [leaf for prompt in prompts for leaf in leaves(prompt) if leaf.media]
        if not parts:
            return {}
        tower = vision_parameters(policy.network)
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in tower):
            policy.features.clear()
            distinct = list(dict.fromkeys(parts))
            made = dict(zip(distinct, self._encode(policy, distinct), strict=True))
            found = [made[part] for part in parts]
        else:
            state = tower_state(policy.network.modules(), tower)
            found = policy.features.gather(state, parts, lambda some: self._encode(policy, some))
        kinds = [kind for kind in KINDS if any(kind in features for features in found)]
        return {kind: MediaFeatures.join([some[kind] for some in found if kind in some]) for kind in kinds}

    def _encode(self, policy: Any, parts: Sequence[Prompt]) -> list[dict[str, MediaFeatures]]:
        """Features of the media of each part, by kind; in one pass of the tower for a kind if the family allows it."""
        made: list[dict[str, MediaFeatures]] = [{} for _ in parts]
        for kind, pixels in KINDS.items():
            some = [number for number, part in enumerate(parts) if pixels in part.media]
            for numbers in [some] if self._family.joins_media and some else [[number] for number in some]:
                media = [parts[number].media for number in numbers]
                found = self._encode_kind(policy, kind, media)
                counts = [len(one[f"{kind}_grid_thw"]) for one in media] if len(numbers) > 1 else []
                for number, own in zip(numbers, found.split(counts) if counts else [found], strict=True):
                    made[number][kind] = own
        return made

    def _encode_kind(self, policy: Any, kind: str, media: Sequence[Mapping[str, Tensor]]) -> MediaFeatures:
        """Features of the images, or of the videos, of some prompts."""
        body = policy.network.base_model
        encode = getattr(body, f"get_{kind}_features")
        given = inspect.signature(encode).parameters.keys() & media[0].keys()
        inputs = {name: torch.cat([one[name] for one in media]) for name in given}
        grids, layout = inputs.get(f"{kind}_grid_thw"), {}
        # on a GPU each image size that the tower reads there would stall every layer
        if grids is not None and policy.device.type != "cpu":
            layout = self._family.media_layout(getattr(body, "visual", None), grids, policy.device)
        for name, value in inputs.items():
            if value is not grids or not layout:
                moved = to_device(value, policy.device)
                inputs[name] = moved.to(body.dtype) if moved.is_floating_point() else moved
        output = encode(**inputs, **layout, return_dict=True)
        return MediaFeatures(output.pooler_output, getattr(output, "deepstack_features", None))


def mixed_embeddings(policy: Any, tokens: Tensor, mixed: Mapping[str, Tensor]) -> Tensor:
    """Embeddings (..., H), without gradient, of tokens (...), or of mixtures where `soft` (...) is not 0.

    A mixture is of tokens `ids` (..., K) with the weights `weights` (..., K).
    """
    embed = policy.network.get_input_embeddings()
    with torch.no_grad():
        whole, parts = embed(tokens), embed(mixed["ids"])
        blend = (mixed["weights"][..., None].to(parts.dtype) * parts).sum(-2)
        return torch.where(mixed["soft"][..., None] > 0, blend, whole)


def cache_argument(model: Any) -> str:
    """Name of the cache among the arguments of a model's forward; transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


MOST_PADDING = 0.25
"""Maximum fraction of padding tokens at which prompts of unequal lengths are batched together."""
