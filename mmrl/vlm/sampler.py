"""Sampling responses: each prompt is read once, its cache is shared by its samples, finished rows leave the batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.vlm.packing import PromptTable, pack_rows, tabulate
from mmrl.vlm.payload import Prompt
from mmrl.vlm.vision import gather_features

if TYPE_CHECKING:
    from mmrl.vlm.policy import VlmPolicy

__all__ = ["FINISH_REASONS", "SamplerConfig", "Samples", "sample"]

COMPACT_BELOW = 0.75
"""Finished rows are dropped once less than this share of a batch is still running."""


@dataclass
class SamplerConfig:
    """How responses are drawn."""

    max_new_tokens: int = 64
    """Longest response in tokens."""

    temperature: float = 1.0
    """Logits are divided by it, in sampling and in scoring."""

    top_p: float = 1.0
    """Draw only from the most likely tokens that together have this probability; below 1 the recorded
    log-probabilities stay those of the full distribution."""

    top_k: int = 0
    """Draw only from this many of the most likely tokens; 0 is all."""

    stop: list[str] = field(default_factory=list)
    """A response ends with the token that completes one of these strings in its decoded text."""

    batch_rows: int = 256
    """Most responses that are decoded at a time; for memory only, the responses do not depend on it."""

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ValueError: a value is out of range.
        """
        for name, valid, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature > 0.0, "above 0; greedy decoding is a setting of its own"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("batch_rows", self.batch_rows >= 1, "at least 1"),
            ("stop", all(self.stop), "made of non-empty strings"),
        ):
            if not valid:
                raise ValueError(f"sampler.{name} is {getattr(self, name)}; it must be {expected}")


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
    kept_mass: Tensor
    """(B, T) float32, probability of the tokens that top_p and top_k left to draw from, 1 on padding."""


def sample(
    policy: VlmPolicy,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: SamplerConfig,
    generator: torch.Generator,
    greedy: bool = False,
) -> Samples:
    """Draw responses.

    Args:
        policy: the model; it samples in evaluation mode and is handed back in the mode that it came in.
        prompts: N prompts.
        samples_per_prompt: G.
        config: lengths, temperature and truncation.
        generator: CPU generator; B * max_new_tokens uniform numbers are drawn from it, none when greedy.
        greedy: take the most likely token; the recorded log-probabilities keep the temperature.

    Returns:
        The responses of prompt 0, then those of prompt 1, and so on, on the policy's device.

    Raises:
        UserError: a setting is out of range, or there are no prompts.
    """
    _check_request(prompts, samples_per_prompt, config)
    total = len(prompts) * samples_per_prompt
    uniforms = None if greedy else torch.rand(total, config.max_new_tokens, generator=generator)
    draw = _Draw(policy, config, total, uniforms)
    training = policy.training
    policy.eval()  # checkpointed layers drop the cache in training mode
    try:
        with torch.no_grad():
            together = max(config.batch_rows // samples_per_prompt, 1)
            for first in range(0, len(prompts), together):
                _sample_prompts(draw, prompts[first : first + together], first, samples_per_prompt)
    finally:
        policy.train(training)
    return draw.collect()


def _check_request(prompts: Sequence[Prompt], samples_per_prompt: int, config: SamplerConfig) -> None:
    try:
        config.validate()
    except ValueError as error:
        raise UserError(str(error)) from error
    if not prompts or samples_per_prompt < 1:
        raise UserError(f"there is nothing to sample: {len(prompts)} prompts, {samples_per_prompt} samples each")


class _Draw:
    """One call of `sample`: its settings and, row by row, what was drawn."""

    def __init__(self, policy: VlmPolicy, config: SamplerConfig, total: int, uniforms: Tensor | None) -> None:
        device, width = policy.device, config.max_new_tokens
        self.policy = policy
        self.config = config
        self.uniforms = None if uniforms is None else uniforms.to(device)
        self.eos = torch.tensor(policy.eos_ids, device=device)
        self.max_positions = int(policy.network.config.text_config.max_position_embeddings)
        self.ids = torch.full((total, width), policy.pad_id, device=device)
        self.mask = torch.zeros((total, width), device=device)
        self.logp = torch.zeros((total, width), device=device)
        self.kept = torch.ones((total, width), device=device)
        self.reason = torch.zeros(total, dtype=torch.int64, device=device)

    def choose(self, rows: Tensor, step: int, hidden: Tensor, running: Tensor) -> Tensor:
        """Draw and record the next token of the rows; those that ended before get the pad token."""
        logp = self.policy.next_logp(hidden, self.config.temperature)
        uniform = None if self.uniforms is None else self.uniforms[rows, step]
        token, kept = _choose(logp, uniform, self.config)
        token = token.where(running, self.policy.pad_id)
        self.ids[rows, step] = token
        self.mask[rows, step] = running.float()
        self.logp[rows, step] = logp.gather(1, token[:, None])[:, 0].where(running, 0.0)
        self.kept[rows, step] = kept.where(running, 1.0)
        return token

    def ended(self, rows: Tensor, step: int, running: Tensor) -> Tensor:
        """Rows whose response is complete with the token of this step."""
        at_eos = torch.isin(self.ids[rows, step], self.eos) & running
        self.reason[rows] = torch.where(at_eos, EOS, self.reason[rows])
        if not self.config.stop:
            return at_eos
        at_stop = self._at_stop(rows, step) & running & ~at_eos
        self.reason[rows] = torch.where(at_stop, STOP, self.reason[rows])
        return at_eos | at_stop

    def collect(self) -> Samples:
        """The responses, no wider than the longest."""
        width = max(int(self.mask.sum(1).max()), 1)
        ids, mask = self.ids[:, :width], self.mask[:, :width]
        lengths = mask.sum(1).long().tolist()
        responses = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
        tokenizer = self.policy.processor.tokenizer
        return Samples(
            response_ids=ids,
            mask=mask,
            logp=self.logp[:, :width],
            finish=[FINISH_REASONS[code] for code in self.reason.tolist()],
            texts=tokenizer.batch_decode(responses, skip_special_tokens=True),
            kept_mass=self.kept[:, :width],
        )

    def _at_stop(self, rows: Tensor, step: int) -> Tensor:
        # a token has at least one byte, so a string that ends here began within its number of bytes
        reach = max(len(text.encode()) for text in self.config.stop)
        tails = self.ids[rows, max(step + 1 - reach, 0) : step + 1].tolist()
        texts = self.policy.processor.tokenizer.batch_decode(tails, skip_special_tokens=True)
        found = [any(stop in text for stop in self.config.stop) for text in texts]
        return torch.tensor(found, device=rows.device)


def _sample_prompts(draw: _Draw, prompts: Sequence[Prompt], first: int, group: int) -> None:
    """Read some prompts once, then decode their samples, at most `batch_rows` at a time."""
    from transformers import DynamicCache

    policy = draw.policy
    network = policy.network
    table = tabulate(prompts, policy.pad_id, policy.device)
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
    last = output.last_hidden_state[own, table.lengths - 1]
    rows = torch.arange(len(prompts) * group, device=policy.device)
    chunks = rows.split(draw.config.batch_rows)
    for number, chunk in enumerate(chunks):
        prompt = chunk // group
        shared = cache if number == len(chunks) - 1 else copy.deepcopy(cache)
        shared.batch_select_indices(prompt)
        _decode(draw, _Batch(draw, table, prompt, chunk + first * group, shared), last[prompt])


class _Batch:
    """Rows that are decoded together: their cache, positions and which cached columns they see."""

    def __init__(self, draw: _Draw, table: PromptTable, prompt: Tensor, rows: Tensor, cache: Any) -> None:
        self.policy = draw.policy
        self.rows = rows
        self.cache = cache
        self.width = table.ids.shape[1]
        self.next_position = table.next_position[prompt]
        self.budget = draw.max_positions - table.lengths[prompt]
        self.visible = _visible(table, prompt, draw.config.max_new_tokens)

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self.cache.batch_select_indices(index)
        self.rows, self.next_position = self.rows[index], self.next_position[index]
        self.budget = self.budget[index]
        self.visible = None if self.visible is None else self.visible[index]

    def advance(self, token: Tensor, step: int) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""
        network = self.policy.network
        seen = self.visible
        output = network.model.language_model(
            inputs_embeds=network.get_input_embeddings()(token[:, None]),
            position_ids=(self.next_position + step)[None, :, None].expand(3, -1, -1),
            attention_mask=None if seen is None else seen[:, : self.width + step + 1],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]


def _visible(table: PromptTable, prompt: Tensor, steps: int) -> Tensor | None:
    """Columns of the cache that hold a token of the row; None where no prompt is padded."""
    width = table.ids.shape[1]
    if bool((table.lengths == width).all()):
        return None
    columns = torch.arange(width + steps, device=prompt.device)[None]
    return (columns < table.lengths[prompt][:, None]) | (columns >= width)


def _decode(draw: _Draw, batch: _Batch, hidden: Tensor) -> None:
    running = torch.ones_like(batch.rows, dtype=torch.bool)
    for step in range(draw.config.max_new_tokens):
        token = draw.choose(batch.rows, step, hidden, running)
        running = running & ~draw.ended(batch.rows, step, running) & (step + 1 < batch.budget)
        left = int(running.sum())
        if left == 0 or step + 1 == draw.config.max_new_tokens:
            return
        if left < COMPACT_BELOW * len(running):
            index = torch.nonzero(running).flatten()
            batch.keep(index)
            token, running = token[index], running[index]
        hidden = batch.advance(token, step)


def _choose(logp: Tensor, uniform: Tensor | None, config: SamplerConfig) -> tuple[Tensor, Tensor]:
    """Token of each row by inversion of its distribution function, and the mass it was drawn from.

    Args:
        logp: (b, V) log-probabilities.
        uniform: (b,) in [0, 1); None takes the most likely token.
        config: truncation.
    """
    if uniform is None:
        return logp.argmax(-1), torch.ones_like(logp[:, 0])
    # float64: in float32 the running sum over a large vocabulary loses the tail
    probability = logp.double().exp()
    if config.top_k or config.top_p < 1.0:
        probability = _truncate(probability, config)
    cumulative = probability.cumsum(-1)
    mass = cumulative[:, -1:]
    index = torch.searchsorted(cumulative, uniform.double()[:, None] * mass, right=True)
    return index[:, 0].clamp(max=logp.shape[1] - 1), mass[:, 0].to(logp.dtype)


def _truncate(probability: Tensor, config: SamplerConfig) -> Tensor:
    """Zero all but the top_k most likely tokens, and of those all but the smallest set with mass top_p."""
    ordered, index = probability.sort(-1, descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if config.top_k:
        kept[:, config.top_k :] = False
    if config.top_p < 1.0:
        inside = ordered * kept
        before = inside.cumsum(-1) - inside
        kept &= before < config.top_p * inside.sum(-1, keepdim=True)
    return torch.zeros_like(probability).scatter(1, index, ordered * kept)


LENGTH, EOS, STOP = range(3)
FINISH_REASONS = ("length", "eos", "stop")
