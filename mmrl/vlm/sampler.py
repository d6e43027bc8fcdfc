"""Sampling responses: each prompt is read once, its keys are shared by its samples, finished rows leave the batch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.errors import ConfigError, UserError
from mmrl.fields import bounded, check_config
from mmrl.training.record.stopwatch import stopwatch
from mmrl.vlm.decoder import PrefixDecoder
from mmrl.vlm.lean_weights import LeanWeights, lean_weights, unsupported_reason
from mmrl.vlm.packing import PromptTable, pack_rows, tabulate
from mmrl.vlm.payload import Prompt
from mmrl.vlm.vision import gather_features

if TYPE_CHECKING:
    from mmrl.vlm.policy import VlmPolicy
    from mmrl.vlm.prefix import Prefix

__all__ = ["FINISH_REASONS", "SamplerConfig", "Samples", "sample"]

LOGGER = logging.getLogger("mmrl")

COMPACT_BELOW = 0.75
"""Finished rows are dropped once less than this share of a batch is still running."""


@dataclass
class SamplerConfig:
    """How responses are drawn."""

    max_new_tokens: int = bounded(64, at_least=1)
    """Longest response in tokens."""

    temperature: float = bounded(1.0, above=0)
    """Logits are divided by it, in sampling and in scoring."""

    top_p: float = bounded(1.0, above=0, at_most=1)
    """Draw only from the most likely tokens that together have this probability; below 1 the recorded
    log-probabilities stay those of the full distribution."""

    top_k: int = bounded(0, at_least=0)
    """Draw only from this many of the most likely tokens; 0 is all."""

    stop: list[str] = field(default_factory=list)
    """A response ends with the token that completes one of these strings in its decoded text."""

    batch_rows: int = bounded(256, at_least=1)
    """Most responses that are decoded at a time; for memory only, the responses do not depend on it."""

    lean: bool = True
    """Decode with the project's own lean decoder where the model allows it; else through transformers."""

    keep_prefill: bool = True
    """Use what sampling computed of the prompts until the weights change; with one update on all rows, in it too."""

    def validate(self) -> None:
        """Refuse empty stop strings; raises ConfigError."""
        if not all(self.stop):
            raise ConfigError(f"sampler.stop is {self.stop}; it must be made of non-empty strings")


@dataclass
class Samples:
    """Responses of N prompts with G samples each, row = prompt * G + sample; B rows of T tokens."""

    response_ids: Tensor
    """(B, T) int64, right-padded with the pad token."""
    mask: Tensor
    """(B, T) float32, 1 up to and including the token that ends the response."""
    logp: Tensor
    """(B, T) float32, log-probability under the full softmax at the sampling temperature, 0 on padding."""
    finish: list[str]
    """Row of `FINISH_REASONS` for each response."""
    texts: list[str]
    """The decoded responses without control tokens; a stop string stays at the end."""
    nucleus_mass: Tensor
    """(B, T) float32, probability of the tokens that top_p and top_k left to draw from, 1 on padding."""


def sample(
    policy: VlmPolicy,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: SamplerConfig,
    generator: torch.Generator,
    greedy: bool = False,
    *,
    keep_prefix: str = "none",
) -> Samples:
    """Draw responses.

    Args:
        policy: the model; it samples in evaluation mode and is handed back in the mode that it came in.
        prompts: N prompts.
        samples_per_prompt: G.
        config: lengths, temperature and truncation.
        generator: CPU generator; B * max_new_tokens uniform numbers are drawn from it, none when greedy.
        greedy: take the most likely token; the recorded log-probabilities keep the temperature.
        keep_prefix: what `policy.prefixes` is given of the prompts: "none", "values" or "graph", which is the values
            with their history; without the lean decoder nothing.

    Returns:
        The responses of prompt 0, then those of prompt 1, and so on, on the policy's device.

    Raises:
        UserError: a setting is out of range, or there are no prompts.
        ValueError: unknown keep_prefix.
    """
    _check_request(prompts, samples_per_prompt, config)
    if keep_prefix not in KEEP_PREFIX:
        raise ValueError(f"keep_prefix={keep_prefix!r}; there are: {', '.join(KEEP_PREFIX)}.")
    total = len(prompts) * samples_per_prompt
    uniforms = None if greedy else torch.rand(total, config.max_new_tokens, generator=generator)
    draw = GenerationState(policy, config, total, uniforms)
    training = policy.training
    policy.eval()  # checkpointed layers drop the cache in training mode
    try:
        with torch.no_grad():
            if _is_lean(policy, config):
                _sample_lean(draw, prompts, samples_per_prompt, keep_prefix)
            else:
                _sample_through_modules(draw, prompts, samples_per_prompt)
    finally:
        policy.train(training)
    return draw.collect()


def _check_request(prompts: Sequence[Prompt], samples_per_prompt: int, config: SamplerConfig) -> None:
    check_config(config, "sampler")
    if not prompts or samples_per_prompt < 1:
        raise UserError(f"there is nothing to sample: {len(prompts)} prompts, {samples_per_prompt} samples each")


def _is_lean(policy: VlmPolicy, config: SamplerConfig) -> bool:
    obstacle = unsupported_reason(policy) if config.lean else "sampler.lean is false"
    if obstacle is not None:
        _log_once("responses are decoded through transformers' modules: %s", obstacle)
    return obstacle is None


@functools.cache
def _log_once(message: str, reason: str) -> None:
    LOGGER.info(message, reason)


class GenerationState:
    """One call of `sample`: its settings and, step by step, what was drawn."""

    def __init__(self, policy: VlmPolicy, config: SamplerConfig, total: int, uniforms: Tensor | None) -> None:
        device, shape = policy.device, (config.max_new_tokens, total)
        self.policy = policy
        self.config = config
        self.uniforms = None if uniforms is None else uniforms.t().to(device, torch.float64).contiguous()
        text = policy.network.config.text_config
        self.is_eos = torch.zeros(text.vocab_size, dtype=torch.bool, device=device)
        self.is_eos[list(policy.eos_ids)] = True
        self.max_positions = int(text.max_position_embeddings)
        self.ids = torch.full(shape, policy.pad_id, device=device)
        self.mask = torch.zeros(shape, device=device)
        self.logp = torch.zeros(shape, device=device)
        self.kept = torch.ones(shape, device=device)
        self.reason = torch.zeros(total, dtype=torch.int64, device=device)

    def choose(self, rows: Tensor, step: int, logp: Tensor, running: Tensor) -> Tensor:
        """Draw and record the next token of the rows; those that ended before get the pad token."""
        uniform = None if self.uniforms is None else self.uniforms[step][rows]
        token, kept = _choose(logp, uniform, self.config)
        token = token.where(running, self.policy.pad_id)
        chosen = logp.gather(1, token[:, None])[:, 0]
        self.ids[step].index_copy_(0, rows, token)
        self.mask[step].index_copy_(0, rows, running.float())
        self.logp[step].index_copy_(0, rows, chosen.where(running, 0.0))
        self.kept[step].index_copy_(0, rows, kept.where(running, 1.0))
        return token

    def ended(self, rows: Tensor, step: int, token: Tensor, running: Tensor) -> Tensor:
        """Rows whose response is complete with the token of this step."""
        at_eos = self.is_eos[token] & running
        self.reason[rows] = torch.where(at_eos, EOS, self.reason[rows])
        if not self.config.stop:
            return at_eos
        at_stop = self._at_stop(rows, step) & running & ~at_eos
        self.reason[rows] = torch.where(at_stop, STOP, self.reason[rows])
        return at_eos | at_stop

    def collect(self) -> Samples:
        """The responses, no wider than the longest."""
        lengths = self.mask.sum(0).long().tolist()
        width = max(*lengths, 1)
        ids, mask, logp, kept = (x[:width].t().contiguous() for x in (self.ids, self.mask, self.logp, self.kept))
        responses = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
        tokenizer = self.policy.processor.tokenizer
        return Samples(
            response_ids=ids,
            mask=mask,
            logp=logp,
            finish=[FINISH_REASONS[code] for code in self.reason.tolist()],
            texts=tokenizer.batch_decode(responses, skip_special_tokens=True),
            nucleus_mass=kept,
        )

    def _at_stop(self, rows: Tensor, step: int) -> Tensor:
        # a token has at least one byte, so a string that ends here began within its number of bytes
        reach = max(len(text.encode()) for text in self.config.stop)
        tails = self.ids[max(step + 1 - reach, 0) : step + 1, rows].t().tolist()
        texts = self.policy.processor.tokenizer.batch_decode(tails, skip_special_tokens=True)
        found = [any(stop in text for stop in self.config.stop) for text in texts]
        return torch.tensor(found, device=rows.device)


class _Decoder(Protocol):
    """Rows that are decoded together."""

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""


def _decode(draw: GenerationState, decoder: _Decoder, rows: Tensor, budget: Tensor, states: Tensor) -> None:
    """Draw the responses of some rows, which have `budget` (b,) positions each."""
    running = torch.ones_like(rows, dtype=torch.bool)
    for step in range(draw.config.max_new_tokens):
        token = draw.choose(rows, step, decoder.next_logp(states, draw.config.temperature), running)
        running = running & ~draw.ended(rows, step, token, running) & (step + 1 < budget)
        left = int(running.sum())
        if left == 0 or step + 1 == draw.config.max_new_tokens:
            return
        if left < COMPACT_BELOW * len(running):
            index = torch.nonzero(running).flatten()
            decoder.keep(index)
            rows, token, budget, running = rows[index], token[index], budget[index], running[index]
        states = decoder.advance(token)


def _sample_lean(draw: GenerationState, prompts: Sequence[Prompt], group: int, keep_prefix: str) -> None:
    """Read the prompts once, then decode their samples, at most `batch_rows` at a time."""
    most = draw.config.batch_rows
    # a history is kept whole, for the one pass that can go back through it
    together = len(prompts) if keep_prefix == "graph" else max(most // group, 1)
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together]
        with stopwatch("prefill"):
            prefix = _read_prompts(draw.policy, part, keep_prefix)
        with stopwatch("decode"):
            weights = lean_weights(draw.policy)
            rows = torch.arange(len(part) * group, device=draw.policy.device)
            for chunk in rows.split(max(most - most % group, min(most, group))):
                _decode_lean(draw, weights, prefix, chunk // group, chunk + first * group)


def _read_prompts(policy: VlmPolicy, prompts: Sequence[Prompt], keep_prefix: str) -> Prefix:
    with torch.set_grad_enabled(keep_prefix == "graph"):
        prefix = policy.encode_prefix(prompts)
    if keep_prefix != "none":
        policy.prefixes.keep(prompts, prefix if keep_prefix == "graph" else prefix.detach())
    return prefix.detach()


def _decode_lean(draw: GenerationState, weights: LeanWeights, prefix: Prefix, prompt: Tensor, rows: Tensor) -> None:
    live, own = torch.unique_consecutive(prompt, return_inverse=True)
    prefix = prefix if len(live) == len(prefix) else prefix.select(live)
    decoder = PrefixDecoder(weights, prefix, own, draw.config.max_new_tokens - 1, draw.policy.banned_ids)
    _decode(draw, decoder, rows, draw.max_positions - prefix.lengths[own], prefix.last_state[own])


def _sample_through_modules(draw: GenerationState, prompts: Sequence[Prompt], group: int) -> None:
    """Read some prompts at a time, each once, then decode their samples, at most `batch_rows` at a time."""
    together = max(draw.config.batch_rows // group, 1)
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together]
        table = tabulate(part, draw.policy.pad_id, draw.policy.device)
        with stopwatch("prefill"):
            cache, last = _fill_cache(draw.policy, part, table)
        rows = torch.arange(len(part) * group, device=draw.policy.device)
        chunks = rows.split(draw.config.batch_rows)
        with stopwatch("decode"):
            for number, chunk in enumerate(chunks):
                prompt = chunk // group
                shared = cache if number == len(chunks) - 1 else copy.deepcopy(cache)
                shared.batch_select_indices(prompt)
                decoder = _ModuleBatch(draw, table, prompt, shared)
                budget = draw.max_positions - table.lengths[prompt]
                _decode(draw, decoder, chunk + first * group, budget, last[prompt])


def _fill_cache(policy: VlmPolicy, prompts: Sequence[Prompt], table: PromptTable) -> tuple[Any, Tensor]:
    """Cache of the prompts and (N, H) the states of their last tokens."""
    from transformers import DynamicCache

    network = policy.network
    own = torch.arange(len(prompts), device=policy.device)
    nothing = torch.zeros((len(prompts), 0), dtype=torch.int64, device=policy.device)
    packed = pack_rows(table, own, nothing, torch.zeros_like(own), policy.pad_id)
    embeddings, extra = policy.embed(packed, gather_features(network.model, prompts, policy.features))
    cache = DynamicCache(config=network.config.text_config)
    output = network.model.language_model(
        inputs_embeds=embeddings,
        position_ids=packed.positions,
        past_key_values=cache,
        use_cache=True,
        **extra,
    )
    return cache, output.last_hidden_state[own, table.lengths - 1]


class _ModuleBatch:
    """Rows that the transformers modules decode together: their cache, positions and which cached columns they see."""

    def __init__(self, draw: GenerationState, table: PromptTable, prompt: Tensor, cache: Any) -> None:
        self.policy = draw.policy
        self.cache = cache
        self.step = 0
        self.width = table.ids.shape[1]
        self.next_position = table.next_position[prompt]
        self.visible = _visible(table, prompt, draw.config.max_new_tokens)

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self.cache.batch_select_indices(index)
        self.next_position = self.next_position[index]
        self.visible = None if self.visible is None else self.visible[index]

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""
        network = self.policy.network
        seen = self.visible
        output = network.model.language_model(
            inputs_embeds=network.get_input_embeddings()(token[:, None]),
            position_ids=(self.next_position + self.step)[None, :, None].expand(3, -1, -1),
            attention_mask=None if seen is None else seen[:, : self.width + self.step + 1],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.step += 1
        return output.last_hidden_state[:, -1]

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self.policy.next_logp(states, temperature)


def _visible(table: PromptTable, prompt: Tensor, steps: int) -> Tensor | None:
    """Columns of the cache that hold a token of the row; None where no prompt is padded."""
    width = table.ids.shape[1]
    if bool((table.lengths == width).all()):
        return None
    columns = torch.arange(width + steps, device=prompt.device)[None]
    return (columns < table.lengths[prompt][:, None]) | (columns >= width)


def _choose(logp: Tensor, uniform: Tensor | None, config: SamplerConfig) -> tuple[Tensor, Tensor]:
    """Token of each row by inversion of its distribution function, and the mass it was drawn from.

    Args:
        logp: (b, V) log-probabilities.
        uniform: (b,) in [0, 1); None takes the most likely token.
        config: truncation.
    """
    if uniform is None:
        return logp.max(-1).indices, torch.ones_like(logp[:, 0])
    probability = logp.exp()
    if config.top_k or config.top_p < 1.0:
        probability = _truncate(probability, config)
    token, mass = _invert(probability, uniform.double())
    return token, mass.to(logp.dtype)


def _invert(probability: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest token whose running sum exceeds the fraction `uniform` (b,) of the total, and the total.

    Sums over blocks find the block, a running sum inside it finds the token: both in float64, because in float32 the
    running sum over a large vocabulary loses the tail, but only over a few numbers.
    """
    blocks = functional.pad(probability, (0, -probability.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    # the two ways to add up a block differ in the last bit; past its end lie tokens without probability
    last = inside[:, -1:]
    target = (target - before).clamp_(min=0.0).minimum(last.nextafter(torch.zeros_like(last)))
    token = block * BLOCK + torch.searchsorted(inside, target, right=True)
    return token[:, 0], ends[:, -1]


def _truncate(probability: Tensor, config: SamplerConfig) -> Tensor:
    """Zero all but the top_k most likely tokens, and of those all but the smallest set with mass top_p."""
    count = min(config.top_k or probability.shape[1], probability.shape[1])
    ordered, index = probability.topk(count) if config.top_k else probability.sort(-1, descending=True)
    if config.top_p < 1.0:
        ends = ordered.cumsum(-1, dtype=torch.float64)
        before = ends - ordered
        ordered = ordered.where(before < config.top_p * ends[:, -1:], 0.0)
    return torch.zeros_like(probability).scatter(1, index, ordered)


BLOCK = 128
"""Tokens whose probabilities are added up before the search."""

KEEP_PREFIX = ("none", "values", "graph")

LENGTH, EOS, STOP = range(3)
FINISH_REASONS = ("length", "eos", "stop")
