"""The policy: scores rollouts, computes each prompt once per group, and counts the experts' routes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.core.logprobs import CHUNK_ELEMENTS, LogProbs, linear_logprobs, logprobs_from_logits
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.files import expanded, follow_umask, replaced
from mmrl.hub.building import merged_weights
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.hub.video_sampling import Frames
from mmrl.runs.checkpoint import check_model
from mmrl.runs.export import model_folder
from mmrl.training.processes import avoid_refused_instructions
from mmrl.vlm.data.prompt import Prompt, PromptLayout, VlmPayload, encode_history, encode_prompt, encode_turn
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.data.turn_template import TurnTemplate
from mmrl.vlm.engine import few_rows
from mmrl.vlm.engine.capabilities import check_architecture, check_behaviour
from mmrl.vlm.engine.model_loading import prepare, set_pixels, template_variables
from mmrl.vlm.engine.prefix import Prefix, PrefixStore
from mmrl.vlm.engine.reader import FeatureCache, ModelReader, weights_state
from mmrl.vlm.engine.rows import Reading, make_reading
from mmrl.vlm.families.family import family_of
from mmrl.vlm.model.model_config import FrozenModelConfig, ModelConfig
from mmrl.vlm.model.network import (
    VALUE_HEAD_FILE,
    architecture,
    build_model_if_missing,
    load_model_weights,
    load_network,
    load_value_head,
    make_value_head,
    processor_folder,
    resolve_model,
    save_model,
    save_value_head,
    vision_parameters,
)
from mmrl.vlm.model.processor import banned_ids, eos_ids, file_eos_ids, load_processor, stop_at
from mmrl.workers.interpreters import local_model

LARGE = 100.0
"""Size of the logits at which a head is compared with its matrix; capped or scaled ones are other numbers there."""


class Head:
    """The head of a transformers model, including what the model does to its logits, such as a soft cap.

    Args:
        network: the model.
    """

    def __init__(self, network: Any) -> None:
        self._network = network
        self.plain = _is_plain(network)
        """Whether the logits are the product of states and output embedding."""

    @property
    def _layer(self) -> Any:
        return self._network.get_output_embeddings()

    @property
    def entries(self) -> int:
        """Width V of the logits, which may exceed the tokens of the tokenizer."""
        return int(self._layer.weight.shape[0])

    def logits(self, states: Tensor) -> Tensor:
        """Logits (M, V) of states (M, H), in their dtype or under autocast in autocast's."""
        if not self.plain:
            return own_logits(self._network, states)
        weight, bias = self._layer.weight, self._layer.bias
        if not torch.is_autocast_enabled(states.device.type):
            weight, bias = weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
        # autocast casts a weight once for all tokens, and not at each
        return few_rows.linear(states, weight, bias)

    def logprobs(
        self, states: Tensor, targets: Tensor, *, temperature: float, banned: Tensor, entropy: bool
    ) -> LogProbs:
        """Log-probabilities (M,) of the targets (M,) and, if asked for, entropies; never more than a chunk of logits.

        Gradient: through states and the head's weights.
        """
        if self.plain:
            layer = self._layer
            return linear_logprobs(
                states, layer.weight, targets, bias=layer.bias, temperature=temperature, banned=banned, entropy=entropy
            )

        def score(part: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
            found = logprobs_from_logits(
                self.logits(part), chosen, temperature=temperature, banned=banned, entropy=entropy
            )
            return found.logp, found.entropy

        rows = max(1, CHUNK_ELEMENTS // self.entries)
        pairs = zip(states.split(rows), targets.split(rows), strict=True)
        scores = [checkpoint(score, *pair, use_reentrant=False) for pair in pairs]
        logp = torch.cat([logp for logp, _ in scores])
        return LogProbs(logp, torch.cat([found for _, found in scores]) if entropy else None)

    def several(self, states: Tensor, ids: Tensor, *, temperature: float, banned: Tensor) -> Tensor:
        """Log-probabilities (M, K) of K tokens `ids` (M, K) at each of M states; keeps no logits.

        Gradient: through states and the head's weights.
        """

        def score(part: Tensor, chosen: Tensor) -> Tensor:
            logits = self.logits(part).float() / temperature
            return logits.index_fill(1, banned, float("-inf")).log_softmax(-1).gather(1, chosen)

        rows = max(1, CHUNK_ELEMENTS // self.entries)
        pairs = zip(states.split(rows), ids.split(rows), strict=True)
        return torch.cat([checkpoint(score, *pair, use_reentrant=False) for pair in pairs])

    @torch.no_grad()
    def collision(self, states: Tensor, targets: Tensor, logp: Tensor, temperature: float, banned: Tensor) -> Tensor:
        """Sum (M,) of the squared probabilities, given the targets' log-probabilities (M,).

        The softmax at half the temperature is p^2 / sum p^2, so one entry of both gives the sum.
        """
        halved = self.logprobs(states, targets, temperature=temperature / 2, banned=banned, entropy=False).logp
        return (2 * logp - halved).exp()


class _Given:
    """Minimal output of a model body: only the last states."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(network: Any, states: Tensor) -> Tensor:
    """Logits (M, V) that a model's `forward` makes of states (M, H), without its body.

    Raises:
        UserError: it does not use its body, but a part of it, so other states than these would decide.
    """
    body, layer = network.base_model, network.get_output_embeddings()
    given = _Given(states[None].to(layer.weight.dtype))
    own = vars(body).get("forward")  # accelerate puts one there
    calls: list[_Given] = []

    def forward(*_: Any, **__: Any) -> _Given:
        calls.append(given)
        return given

    body.forward = forward
    try:
        nothing = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
        found = network(input_ids=nothing, use_cache=False).logits
        if not calls:
            raise UserError(
                f"a model of type {network.config.model_type} does not compute its logits from the output of its body, "
                "so responses cannot be scored; choose another model"
            )
        return found[0]
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own


def _is_plain(network: Any) -> bool:
    """Whether the logits are the product of states and output embedding, tested on two states."""
    layer = network.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        return False
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        states = torch.randn(2, layer.in_features, generator=draw).to(layer.weight)
        states = states * (LARGE / layer(states).abs().max().clamp(min=1e-6))
        return torch.allclose(own_logits(network, states).float(), layer(states).float(), rtol=1e-2, atol=1e-2)


class Routes:
    """Sums of the router decisions of a network over tokens and layers; inactive unless `wanted`.

    Sums are (..., 2, E): how often each of E experts is chosen, and the sum of its probabilities, which has a gradient.
    """

    def __init__(self, network: Any, *, wanted: bool) -> None:
        self._routers = _find_routers(network) if wanted else []
        self.top_k = int(getattr(network.config.get_text_config(), "num_experts_per_tok", 0))
        """Experts that a token is sent to in a layer."""
        self._seen: list[Tensor] = []
        self._parts: list[Tensor] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what the routers decide about the tokens of one pass."""
        self._seen = []
        with ExitStack() as hooks:
            for router, place in self._routers:
                hook = router.register_forward_hook(
                    lambda _, __, output, place=place: self._seen.append(output[place] if place is not None else output)
                )
                hooks.callback(hook.remove)
            yield

    def sums(self, owner: Tensor, count: int) -> Tensor | None:
        """Sums (count, 2, E) of the pass just watched; `owner` (M,) int64 of each token, -1 for padding."""
        if not self._routers:
            return None
        seen, self._seen = self._seen, []
        real = owner >= 0
        found = []
        for logits in seen:  # as `load_balancing_loss_func` of transformers
            probability = logits.reshape(len(owner), -1)[real].softmax(-1)
            chosen = torch.zeros_like(probability).scatter(1, probability.topk(self.top_k, -1).indices, 1.0)
            found.append(torch.stack([chosen, probability], 1).to(torch.promote_types(logits.dtype, torch.float32)))
        tokens = torch.stack(found).sum(0)
        return tokens.new_zeros(count, *tokens.shape[1:]).index_add(0, owner[real], tokens)

    def add(self, real: Tensor) -> None:
        """Count the tokens of the last watched pass for which `real` (M,) is True."""
        if (found := self.sums(real.long() - 1, 1)) is not None:
            self._parts.append(found[0])

    def add_rows(self, hidden: Tensor, before: Tensor, reading: Reading) -> None:
        """Count rows just watched, of states (R, L, H) and prompts of `before` (R,) tokens, where tokens are scored."""
        scored = torch.zeros(len(before), dtype=torch.bool, device=before.device)
        scored[reading.row] = True
        ends = (before + reading.lengths)[:, None]
        self.add(((torch.arange(hidden.shape[1], device=before.device) < ends) & scored[:, None]).flatten())

    def add_prompts(self, found: Tensor | None, reading: Reading) -> None:
        """Count prompts with sums (N, 2, E) once per row that uses them, as if every row had its own prompt."""
        if found is not None:
            rows = torch.bincount(reading.group[reading.row.unique()], minlength=len(found))
            self._parts.append(torch.tensordot(rows.to(found.dtype), found, 1))

    def take(self) -> Tensor | None:
        """Sums (2, E) of all counts since the last call; None if nothing was counted."""
        parts, self._parts = self._parts, []
        return torch.stack(parts).sum(0) if parts else None


def _find_routers(network: Any) -> list[tuple[nn.Module, int | None]]:
    """Routers of the decoder layers, and the place of their logits in what they return; raises UserError."""
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in network.modules()]
    wanted = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    places = {getattr(one, "target_class", one): getattr(one, "index", None) for one in wanted}
    found = [(module, places[type(module)]) for module in network.modules() if type(module) in places]
    if not found or not hasattr(sys.modules[type(network).__module__], "load_balancing_loss_func"):
        raise UserError(
            "model.router_aux_loss_coef is above 0, but transformers has no load-balancing loss for models of type "
            f"{network.config.model_type}; it only exists for mixtures of experts such as qwen3_moe and qwen3_vl_moe"
        )
    return found


OUTPUTS = frozenset({"logp", "entropy", "values", "collision", "routes", "states"})


class VlmPolicy(nn.Module):
    """A causal language model with a vision tower, as an actor and optionally a critic.

    Args:
        model: transformers model, or the peft model around it.
        processor: its processor.
        config: how it was loaded.
        value_head: critic from a state (M, H) to a value (M, 1).
    """

    model: Any
    value_head: nn.Module | None
    banned_ids: Tensor
    critic_parts = ("value_head",)
    keeps_images = False  # of encoded prompts, see `PromptLayout`
    starts_from_adapter: bool = False
    """Whether the run starts from trained adapters; the initial model then differs from the base model."""

    def __init__(
        self, model: nn.Module, processor: Any, config: ModelConfig, value_head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.processor = processor
        self.config = config
        self.value_head = value_head
        self.family = family_of(self.network.config.model_type)
        tokenizer = processor.tokenizer
        stops = eos_ids(self.network, tokenizer)
        self._template = template_variables(processor, config, self.family.thinking_switch)
        self.turns = TurnTemplate(processor, self._template, stops, config.path, config.answer_tokens)
        self.eos_ids = self.turns.end_ids(stops)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_ids[0]
        self.register_buffer("banned_ids", banned_ids(self.network, tokenizer), persistent=False)
        self.features = FeatureCache()
        self.prefixes = PrefixStore(self)
        self.reader = ModelReader(self.network, config)
        self.head = Head(self.network)
        self.routes = Routes(self.network, wanted=config.router_aux_loss_coef > 0)
        self._adapter_off = False

    def __deepcopy__(self, memo: dict[int, Any]) -> VlmPolicy:
        """A copy has its own adapters and prefixes; it shares the base of adapters and a frozen tower with features."""
        tower = vision_parameters(self.network)
        # a memo entry makes deepcopy return the same object, so these weights take no second memory
        if self.has_adapter:
            # a weight that is already in the memo is shared by deepcopy instead of copied
            memo |= {id(weight): weight for name, weight in self.model.named_parameters() if ".lora_" not in name}
        if not any(weight.requires_grad for weight in tower):
            memo |= {id(weight): weight for weight in tower} | {id(self.features): self.features}
        # without __init__, which would build everything again; the store of prefixes belongs to one policy
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "prefixes"})
        copied.prefixes = PrefixStore(copied)
        return copied

    @property
    def network(self) -> Any:
        """The transformers model, out of its peft wrapper."""
        return self.model.base_model.model if self.has_adapter else self.model

    @property
    def has_adapter(self) -> bool:
        """Whether the model carries LoRA adapters."""
        return hasattr(self.model, "peft_config")

    @property
    def device(self) -> torch.device:
        """Device of the language model's head."""
        return self.network.get_output_embeddings().weight.device

    @property
    def reads_media(self) -> bool:
        """Whether the processor turns images or videos into tokens; a language model's processor does not."""
        return any(getattr(self.processor, kind, None) is not None for kind in ("image_token", "video_token"))

    @property
    def model_kind(self) -> str:
        """The kind of model in words: a vision-language model or a language model."""
        return "vision-language model" if self.reads_media else "language model"

    def check_reads_media(self, what: str) -> None:
        """Reject a language model if images or videos are used; raises UserError."""
        if not self.reads_media:
            kind = self.network.config.model_type
            raise UserError(f"{what}, but {self.config.path} ({kind}) is a language model, which only reads text")

    @property
    def shares_prefix(self) -> bool:
        """Whether a prompt is computed once for its group instead of once for each response."""
        return self.reader.trains_shared(self)

    @property
    def width(self) -> int:
        """Entries of a state."""
        return int(self.network.config.get_text_config().hidden_size)

    @property
    def positions(self) -> int:
        """Maximum number of prompt and response tokens that the model has positions for."""
        return int(self.network.config.get_text_config().max_position_embeddings)

    def check_response_length(self, max_new_tokens: int) -> None:
        """Reject a response length that leaves no room for a prompt; raises UserError."""
        if max_new_tokens >= self.positions:
            raise UserError(
                f"sampler.max_new_tokens is {max_new_tokens}, but {self.config.path} has only {self.positions} "
                "positions for prompt and response together; use a lower value"
            )

    @property
    def layout(self) -> PromptLayout:
        """Model sizes that prompt encoding depends on."""
        patch_size, merge_size, _ = self.family.sizes(self.network.config)
        longest, limit = self.positions - 1, self.config.max_prompt_tokens
        own = limit is not None and limit <= longest
        return PromptLayout(
            patch_size=patch_size,
            max_tokens=limit if own and limit is not None else longest,
            limit_source="model.max_prompt_tokens"
            if own
            else ("the number of positions that the model leaves for a prompt"),
            merge_size=merge_size,
            tables=self.family.token_tables(self.network),
            fits_frames=self.family.fits_frames,
            template=self._template,
            keeps_images=self.keeps_images,
        )

    def encode(
        self, task: VlmTask, images: Sequence[Image.Image] | None = None, videos: Sequence[Frames] | None = None
    ) -> Prompt:
        """Turn a task into a prompt.

        Args:
            task: question with its images and videos.
            images: use these instead of the task's.
            videos: use these frames instead of the task's videos.

        Raises:
            TaskError: the question cannot be encoded.
        """
        return encode_prompt(task, self.processor, self.layout, images, videos)

    def encode_turn(self, task: VlmTask, *, answered: bool = True, end: int | None = None) -> Prompt:
        """Encode the user's next message, or tool results, as the tokens between two answers.

        Args:
            task: the messages, with their images; a result has the `name` of its function.
            answered: whether the previous answer ended with its end token; if not, the result starts with one.
            end: that token; None means the end token of the template.

        Raises:
            TaskError: the message cannot be encoded; UserError: the template does not show it.
        """
        last = (self.eos_ids[0] if end is None else end) if answered else None
        return encode_turn(task, self.turns, self.processor, self.layout, end=last)

    def encode_history(self, task: VlmTask, known: dict[Any, Prompt], image_keys: Sequence[Any]) -> Prompt:
        """Encode a conversation with earlier answers as the chat template writes it before the next answer.

        Args:
            task: the messages, with their images.
            known: pieces of conversations that were encoded before; new ones are added.
            image_keys: a key of each image, equal for equal images.

        Raises:
            TaskError: the conversation cannot be encoded; TemplateError: the template rejects it.
        """
        return encode_history(task, self.turns, self.processor, self.layout, known, image_keys)

    def encode_answer(self, prompt: Prompt, text: str, *, ends: bool = True) -> list[int]:
        """Tokens of a given answer after a prompt, as the chat template writes it; with its end if it `ends`."""
        return self.turns.encode_answer(prompt.text, text, ends=ends)

    def forward(
        self,
        rollouts: Rollouts,
        *,
        view: str = "original",
        temperature: float = 1.0,
        outputs: frozenset[str] = frozenset({"logp"}),
    ) -> PolicyOutputs:
        """Score the sampled tokens of every row.

        Args:
            rollouts: rows whose payload is a `VlmPayload`.
            view: form of the prompts: "original" or a key of the payload's views.
            temperature: logits are divided by it.
            outputs: any of `OUTPUTS`; "routes" with `model.router_aux_loss_coef`.

        Returns:
            Scores (B, T) float32, 0 where the mask is 0. The value is that of the state before each token.

        Raises:
            ValueError: unknown outputs, or values without a value head.

        Gradient: flows into all trainable weights, that of the values only into the value head where
        `model.critic.stop_gradient` is set; each distinct prompt passes the vision tower once, and where
        `shares_prefix` the language model too.
        """
        if not outputs <= OUTPUTS:
            raise ValueError(f"outputs={sorted(outputs)}; a policy scores: {', '.join(sorted(OUTPUTS))}.")
        if "values" in outputs and self.value_head is None:
            raise ValueError('outputs has "values" but the policy has no value head; load it with value_head=True.')
        states, targets, routes = self._states(rollouts, view)
        row_and_step = tuple(to_device(x, self.device) for x in torch.nonzero(rollouts.host.mask, as_tuple=True))

        def spread(flat: Tensor) -> Tensor:
            """Scatter scores (M,) of the tokens under the mask to (B, T)."""
            zeros = torch.zeros(rollouts.mask.shape, dtype=flat.dtype, device=flat.device)
            return zeros.index_put(row_and_step, flat)

        # a pass for values alone needs no graph through the vocabulary, its largest tensors
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(outputs & {"logp", "entropy"})):
            found = self.head.logprobs(
                states, targets, temperature=temperature, banned=self.banned_ids, entropy="entropy" in outputs
            )
        values = None
        if "values" in outputs and self.value_head is not None:
            with _no_autocast(states):
                seen = states.detach() if self.config.critic.stop_gradient else states
                values = spread(self.value_head(seen.float()).squeeze(-1))
        collision = None
        if "collision" in outputs:
            collision = spread(self.head.collision(states, targets, found.logp, temperature, self.banned_ids))
        return PolicyOutputs(
            logp=spread(found.logp),
            entropy=None if found.entropy is None else spread(found.entropy),
            values=values,
            collision=collision,
            routes=routes if "routes" in outputs else None,
            states=states if "states" in outputs else None,
        )

    def states(self, rollouts: Rollouts, *, view: str = "original") -> Tensor:
        """Last hidden states before the tokens under the mask, for a recipe's custom critics.

        Args:
            rollouts: rows whose payload is a `VlmPayload`.
            view: form of the prompts, as in `forward`.

        Returns:
            (M, H), the tokens row by row, with the gradient of `forward`.
        """
        return self._states(rollouts, view)[0]

    def encode_prefix(self, prompts: Sequence[Prompt]) -> Prefix:
        """Run N prompts through the vision tower and the language model once each.

        Gradient: flows into all trainable weights.
        """
        return self.reader.encode_prefix(self, prompts)

    def last_states(self, prompts: Sequence[Prompt]) -> Tensor:
        """States (N, H) of the last tokens of N prompts."""
        return self.reader.last_states(self, prompts)

    def weights_state(self) -> tuple[object, ...]:
        """A value that changes whenever the same prompt would give different numbers: weights, adapter, precision."""
        kind = self.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return weights_state(self.parameters()), self._adapter_off, precision

    def _states(self, rollouts: Rollouts, view: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """States (M, H) before the tokens under the mask, these tokens (M,), and the sums of `Routes` over all rows."""
        payload = VlmPayload.of(rollouts)
        reading = make_reading(payload, view, rollouts.host.group, rollouts.host.mask, self.device)
        return self.reader.states(self, reading), reading.targets, self.routes.take()

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) float32 of the next token, with the banned tokens and temperature of scoring."""
        logits = self.head.logits(states).float() / temperature
        # banned before the softmax, as in scoring, so that the other tokens add up to 1
        return logits.index_fill(1, self.banned_ids, float("-inf")).log_softmax(-1)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the model without its LoRA adapters, as the reference of a KL term."""
        if not self.has_adapter:
            raise UserError("the model has no adapter to disable; set model.lora.enabled or use a frozen copy")
        # peft also switches requires_grad, off with the adapter and then on, even if it was off before
        trained = {weight: weight.requires_grad for weight in self.model.parameters()}
        self._adapter_off = True
        try:
            with self.model.disable_adapter():
                yield
        finally:
            self._adapter_off = False
            for weight, flag in trained.items():
                weight.requires_grad_(flag)

    def save_pretrained(self, path: Path | str) -> None:
        """Write model, processor and value head to a folder.

        Without LoRA it is an ordinary model folder. With LoRA it holds the adapter, whose configuration names the base
        model; transformers' AutoModel class then loads the base model with the adapter.
        """
        save_model(self.model, Path(path))
        self.processor.save_pretrained(path)
        if self.value_head is not None:
            save_value_head(self.value_head, Path(path))
        follow_umask(Path(path))

    def save_merged(self, path: Path | str) -> None:
        """Write an ordinary model folder, with LoRA adapters merged into the weights."""
        if not self.has_adapter:
            self.save_pretrained(path)
            return
        # written to a draft that replaces the folder at the end, so that no partial model is left behind
        with replaced(Path(path)) as draft:
            with quiet_transformers():
                self.network.save_pretrained(draft, state_dict=merged_weights(self.network, self.model.active_adapter))
            self.processor.save_pretrained(draft)

    def load_weights(self, path: Path | str) -> None:
        """Load the weights that `save_pretrained` of a policy of this shape wrote, bit for bit; raises UserError."""
        load_model_weights(self.model, Path(path))
        if self.value_head is not None:
            load_value_head(self.value_head, Path(path))


def _no_autocast(x: Tensor) -> torch.autocast:
    """Run heads in the precision of the states, like `linear_logprobs`, so that all scores agree."""
    return torch.autocast(device_type=x.device.type, enabled=False)


def read_turns(config: FrozenModelConfig) -> TurnTemplate | None:
    """The chat template of a model without its weights; None if the model is not on this machine.

    Raises:
        UserError: the model's processor cannot be loaded.
    """
    if not isinstance(config, ModelConfig):
        config = ModelConfig(**vars(config))
    if not local_model(model_folder(config.path)).is_dir():
        return None
    base, adapter = resolve_model(model_folder(config.path))
    _, settings = architecture(base)
    processor = load_processor(processor_folder(base, adapter), config.chat_template)
    variables = template_variables(processor, config, family_of(settings.model_type).thinking_switch)
    stops = file_eos_ids(base, settings, processor.tokenizer)
    return TurnTemplate(processor, variables, stops, config.path, config.answer_tokens)


def load_policy(config: FrozenModelConfig, *, value_head: bool = False, policy_class: Any = VlmPolicy) -> VlmPolicy:
    """Load or build a model and wrap it as a policy.

    Args:
        config: which model and how; a `ModelConfig` for one that is trained. Its path may be a run's folder.
        value_head: add a critic of `config.critic`; it starts at value 0 unless the folder holds one.
        policy_class: class of the policy.

    Returns:
        The policy on the CPU, in evaluation mode.

    Raises:
        UserError: a setting is out of range, or the model is missing, damaged or of another architecture.
    """
    if not isinstance(config, ModelConfig):
        config = ModelConfig(**vars(config))
    check_config(config, "model")
    config = dataclasses.replace(config, path=model_folder(config.path))
    if config.dtype == "bfloat16":
        avoid_refused_instructions()
    ensure_torchvision()
    build_model_if_missing(config)
    folder = expanded(config.path)
    check_model(folder)
    base, adapter = resolve_model(config.path)
    check_architecture(*architecture(base))
    network = load_network(config, base)
    processor = load_processor(processor_folder(base, adapter), config.chat_template)
    # saved with the model, so that `generate` draws no token either that sampling leaves out
    network.generation_config.suppress_tokens = banned_ids(network, processor.tokenizer).tolist() or None
    set_pixels(processor, config)
    model = prepare(network, config, adapter)
    head = make_value_head(network.config.get_text_config().hidden_size, config.critic) if value_head else None
    if head is not None and (folder / VALUE_HEAD_FILE).is_file():
        load_value_head(head, folder)
    policy: VlmPolicy = policy_class(model, processor, config, head).eval()
    # matters for a reference: switching the adapter off would give the base model, not the model at the start
    policy.starts_from_adapter = policy.has_adapter and adapter is not None
    stop_at(network, policy.eos_ids)
    check_behaviour(policy)
    return policy
