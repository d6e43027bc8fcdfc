"""Sample responses: each prompt is read once for all its samples, and finished rows are dropped from the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.payload import to_device, to_host
from mmrl.errors import ConfigError, UserError
from mmrl.fields import bounded, check_config, rare
from mmrl.runs.run_log import stopwatch
from mmrl.training.processes import Streams
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.engine.few_rows import in_blocks
from mmrl.vlm.engine.prefix import CachedPart, Decoder, KeepPrefill, Prefix, make_decoder
from mmrl.vlm.engine.vlm_policy import VlmPolicy

LENGTH, EOS, STOP = range(3)
FINISH_REASONS = ("length", "eos", "stop")


@dataclass
class AnswerSampling:
    """How evaluations sample responses; the temperature is `evaluation.temperature`."""

    place: ClassVar[str] = "evaluation.sampler"
    """Configuration section, for error messages."""
    max_new_tokens: int = bounded(64, at_least=1)
    """Maximum response length in tokens."""
    stop: list[str] = rare(field(default_factory=list))
    """Stop strings: a response ends with the token that completes one of them in the decoded text."""
    batch_rows: int = rare(bounded(256, at_least=1))
    """Maximum number of responses decoded at once. Affects memory only."""

    @property
    def config(self) -> SamplerConfig:
        """The same options as a `SamplerConfig`."""
        return SamplerConfig(**{item.name: getattr(self, item.name) for item in fields(AnswerSampling)})

    def validate(self) -> None:
        """Reject empty stop strings; raises ConfigError."""
        if not all(self.stop):
            raise ConfigError(f"{self.place}.stop is {self.stop}; it must contain only non-empty strings")


@dataclass
class SamplerConfig(AnswerSampling):
    """Lengths, temperature and truncation of sampled responses."""

    place: ClassVar[str] = "sampler"
    temperature: float = bounded(1.0, above=0)
    """Softmax temperature for sampling and scoring."""
    top_p: float = bounded(1.0, above=0, at_most=1)
    """Nucleus sampling: sample only from the smallest set of tokens with this total probability. Recorded
    log-probabilities are still those of the full distribution."""
    top_k: int = bounded(0, at_least=0)
    """Sample only from this many of the most likely tokens; 0 means all."""
    keep_prefill: bool = rare(True)
    """Keep the prompts' KV cache from sampling until the weights change, and reuse it in the update if there is only
    one."""

    @property
    def config(self) -> SamplerConfig:
        """Itself."""
        return self

    def whole(self, temperature: float) -> SamplerConfig:
        """The same options at another temperature, without truncation."""
        return replace(self, temperature=temperature, top_p=1.0, top_k=0)

    @property
    def truncates(self) -> bool:
        """Whether top_p or top_k truncates the distribution."""
        return self.top_p < 1.0 or self.top_k > 0

    @property
    def draws(self) -> int:
        """Number of random numbers per response."""
        return self.max_new_tokens


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
    """Entry of `FINISH_REASONS` for each response."""
    texts: list[str]
    """Decoded responses without control tokens; a stop string at the end is kept. If the chat template ended the prompt
    with `<think>`, they begin with it."""
    nucleus_mass: Tensor
    """(B, T) float32, total probability of the tokens kept by top_p and top_k, 1 on padding."""


BLOCK = 128
"""Vocabulary entries per block whose probabilities are summed before the search."""


def choose_tokens(logp: Tensor, uniform: Tensor | None, top_p: float = 1.0, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """Draw a token for each row by inverting its cumulative distribution; greedy if `uniform` is None."""
    if uniform is None:  # greedy: nothing is truncated, so the mass is 1
        return logp.max(-1).indices, torch.ones_like(logp[:, 0])
    probability = logp.exp()
    if top_k or top_p < 1.0:
        probability = _truncate(probability, top_p, top_k)
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


NUCLEUS = 2048
"""Number of most likely tokens within which `top_p` must be reached; otherwise the whole vocabulary is sorted."""


def _truncate(probability: Tensor, top_p: float, top_k: int) -> Tensor:
    """Keep the top_k most likely tokens, and of those the smallest set with mass top_p; zero the rest."""
    entries = probability.shape[1]
    # a GPU sorts fast, and would have to wait for the rows that need it
    if top_k or entries <= NUCLEUS or probability.device.type != "cpu":
        return _sorted_nucleus(probability, top_p, min(top_k or entries, entries))
    ordered = probability.topk(NUCLEUS).values
    target = top_p * probability.sum(-1, keepdim=True, dtype=torch.float64)
    missing = target - (ordered.cumsum(-1, dtype=torch.float64) - ordered)  # at each token, before it is added
    kept = (missing > 0).sum(-1, keepdim=True)
    last, following = (ordered.gather(1, place.clamp(0, NUCLEUS - 1)) for place in (kept - 1, kept))
    # sums in another order may differ by this much, and of equal tokens at the end the sort decides which belong
    rounding = 2 * entries * torch.finfo(torch.float64).eps * target
    clear = (last > following)[:, 0] & (missing.abs() > rounding).all(-1)
    found = probability.where(probability >= last, 0.0)
    rest = torch.nonzero(~clear).flatten()
    if len(rest):
        found[rest] = _sorted_nucleus(probability[rest], top_p, entries)
    return found


def _sorted_nucleus(probability: Tensor, top_p: float, count: int) -> Tensor:
    """The same from the `count` most likely tokens in order."""
    whole = count == probability.shape[1]
    ordered, index = probability.sort(-1, descending=True) if whole else probability.topk(count)
    if top_p < 1.0:
        ends = ordered.cumsum(-1, dtype=torch.float64)
        before = ends - ordered  # so that the token that crosses top_p still belongs to the set
        ordered = ordered.where(before < top_p * ends[:, -1:], 0.0)
    return torch.zeros_like(probability).scatter(1, index, ordered)


COMPACT_BELOW = 0.75
"""Finished rows are dropped once less than this fraction of a batch is still running."""
CHECK_EVERY = 32
"""Interval in tokens at which a GPU is asked which rows are still running; a CPU is asked at each token."""
FEW_ROWS = 16
"""Number of rows that a GPU decodes in about the time of one, because reading the weights dominates; up to this number
none are dropped."""


class GenerationState:
    """State of one call of `sample` with B rows: its settings and the tokens drawn so far.

    `uniforms` (B, max_new_tokens) are random numbers in [0, 1); None decodes greedily.
    """

    def __init__(
        self,
        policy: VlmPolicy,
        config: SamplerConfig,
        total: int,
        uniforms: Tensor | None,
        limits: Sequence[int] | None = None,
    ) -> None:
        # steps first, so that each step writes to contiguous memory
        device, shape = policy.device, (config.max_new_tokens, total)
        self.policy = policy
        self.config = config
        self.uniforms = None if uniforms is None else to_device(uniforms.t().double().contiguous(), device)
        text = policy.network.config.get_text_config()
        # a table on the device, so that finding end tokens does not wait for the GPU
        is_eos = torch.zeros(text.vocab_size, dtype=torch.bool)
        is_eos[list(policy.eos_ids)] = True
        self.is_eos = to_device(is_eos, device)
        self.max_positions = policy.positions
        longest = torch.tensor([config.max_new_tokens] if limits is None else limits)
        self.limits = longest.repeat_interleave(total // len(longest))  # on the CPU
        self.ids = torch.full(shape, policy.pad_id, device=device)
        self.mask = torch.zeros(shape, device=device)
        self.logp = torch.zeros(shape, device=device)
        self.kept = torch.ones(shape, device=device)
        self.reason = torch.zeros(total, dtype=torch.int64, device=device)
        self.tables = [(self.ids, policy.pad_id), (self.mask, 0.0), (self.logp, 0.0), (self.kept, 1.0)]
        """Tables (max_new_tokens, B) of the tokens, and of what follows the end of a response."""

    def budget(self, rows: Tensor, prompt: Tensor) -> Tensor:
        """Maximum response lengths of some rows, after prompts of these lengths (b,); all on the CPU."""
        return torch.minimum(self.max_positions - prompt, self.limits[rows])

    def choose(self, rows: Tensor, step: int, logp: Tensor, running: Tensor) -> Tensor:
        """Draw and record the next token of each row; rows that have ended get the pad token."""
        uniform = None if self.uniforms is None else self.uniforms[step][rows]
        # a number per (row, step), drawn before the loop: a row's tokens do not depend on the rows next to it
        token, kept = choose_tokens(self.drawn_from(logp), uniform, self.config.top_p, self.config.top_k)
        # rows that have ended stay in the batch until it is compacted, and draw tokens that do not count
        token = token.where(running, self.policy.pad_id)
        # of the full distribution, not the truncated one: the update scores the same quantity
        chosen = logp.gather(1, token[:, None])[:, 0]
        self.ids[step].index_copy_(0, rows, token)
        self.mask[step].index_copy_(0, rows, running.float())
        self.logp[step].index_copy_(0, rows, chosen.where(running, 0.0))
        self.kept[step].index_copy_(0, rows, kept.where(running, 1.0))
        return token

    def drawn_from(self, logp: Tensor) -> Tensor:
        """Log-probabilities (b, V) to draw tokens from, given the policy's; the recorded ones stay `logp`."""
        return logp

    def inputs(self, rows: Tensor, step: int, token: Tensor) -> Tensor:
        """Input of the model for the rows in this step: their tokens (b,), or embeddings (b, H)."""
        return token

    def ended(self, rows: Tensor, step: int, token: Tensor, running: Tensor) -> Tensor:
        """Rows whose response ends with the end token that they drew in this step."""
        at_eos = self.is_eos[token] & running
        self.reason[rows] = torch.where(at_eos, EOS, self.reason[rows])
        return at_eos

    def alive(self, rows: Tensor, steps: range, running: Tensor) -> Tensor:
        """Rows (b,) on the CPU that are still running after these steps; rows with a stop string are cut after it."""
        if not self.config.stop:
            return running.cpu()
        # a token has at least one byte, so a string that ends here began within its number of bytes
        reach = max(len(text.encode()) for text in self.config.stop)
        first = max(steps.start + 1 - reach, 0)
        ids = self.ids[first : steps.stop, rows]
        drawn, at_eos = self.mask[steps.start : steps.stop, rows] > 0, self.is_eos[ids[steps.start - first :]]
        ids, drawn, alive = to_host([ids, drawn & ~at_eos, running])
        step, place = torch.nonzero(drawn, as_tuple=True)
        tails = [
            ids[max(number + 1 - reach, 0) : number + 1, row].tolist()
            for number, row in zip((step + steps.start - first).tolist(), place.tolist(), strict=True)
        ]
        texts = self.policy.turns.decode(tails) if tails else []
        ends: dict[int, int] = {}
        for number, row, text in zip(step.tolist(), place.tolist(), texts, strict=True):
            if row not in ends and any(stop in text for stop in self.config.stop):
                ends[row] = steps.start + number + 1
        if ends:
            self._cut(rows, ends, steps.stop)
            alive[list(ends)] = False
        return alive

    def _cut(self, rows: Tensor, ends: dict[int, int], read: int) -> None:
        """End the responses of some of the rows at a stop string, after as many tokens, of `read` that are drawn."""
        found = rows[to_device(torch.tensor(list(ends)), rows.device)]
        self.reason[found] = STOP
        lengths = torch.tensor(list(ends.values()))
        first = int(lengths.min())
        behind = to_device(torch.arange(first, read)[:, None] >= lengths, rows.device)
        for table, blank in self.tables:
            table[first:read, found] = torch.where(behind, blank, table[first:read, found])

    def collect(self, prompts: Sequence[Prompt]) -> Samples:
        """The responses to the prompts (B,), padded to the longest."""
        found = to_host([self.mask.sum(0).long(), self.ids, self.reason])
        lengths, reasons = found[0].tolist(), found[2].tolist()
        width = max(*lengths, 1)
        ids, mask, logp, kept = (x[:width].t().contiguous() for x in (self.ids, self.mask, self.logp, self.kept))
        responses = [row[:length] for row, length in zip(found[1].t().tolist(), lengths, strict=True)]
        texts = self.policy.turns.decode(responses)
        return Samples(
            response_ids=ids,
            mask=mask,
            logp=logp,
            finish=[FINISH_REASONS[code] for code in reasons],
            texts=[prompt.answer_start + text for prompt, text in zip(prompts, texts, strict=True)],
            nucleus_mass=kept,
        )


def decode(state: GenerationState, decoder: Decoder, rows: Tensor, budget: Tensor, states: Tensor) -> None:
    """Draw responses token by token, dropping finished rows from the batch.

    Args:
        state: of the call.
        decoder: of the rows.
        rows: (b,) int64 on the CPU, their numbers.
        budget: (b,) int64 on the CPU, their maximum lengths.
        states: (b, H) after their prompts.
    """
    last, device = min(state.config.max_new_tokens, max(int(budget.max()), 1)) - 1, state.ids.device
    every = 1 if device.type == "cpu" else CHECK_EVERY
    rows, budget = to_device(rows, device), to_device(budget, device)
    running, first = torch.ones_like(rows, dtype=torch.bool), 0
    for step in range(last + 1):
        token = state.choose(rows, step, decoder.next_logp(states, state.config.temperature), running)
        running = running & ~state.ended(rows, step, token, running) & (step + 1 < budget)
        if step == last and not state.config.stop:
            return
        if step == last or step + 1 - first == every:
            alive = state.alive(rows, range(first, step + 1), running)  # the one wait for a GPU
            if step == last or not alive.any():
                return
            first, index = step + 1, kept_rows(alive, every)
            running = running & to_device(alive, rows.device)
            # dropping rows copies the caches of all that remain, so it has to pay for itself
            if index is not None:
                decoder.keep(index)
                index = to_device(index, rows.device)
                rows, token, budget, running = rows[index], token[index], budget[index], running[index]
        states = decoder.advance(state.inputs(rows, step, token))


def kept_rows(alive: Tensor, every: int) -> Tensor | None:
    """Index (n,) of the rows to go on with, given which (b,) are still running; None keeps all.

    On a GPU the number of rows is halved, so that few sizes occur for which a step has to be captured again: rows that
    have ended fill up the batch.
    """
    total, left = len(alive), int(alive.sum())
    if every == 1:
        return torch.nonzero(alive).flatten() if left < COMPACT_BELOW * total else None
    size = total
    while size > FEW_ROWS and (half := max((size + 1) // 2, FEW_ROWS)) >= left:
        size = half
    # running rows first, then others, in the order of the batch
    return None if size == total else torch.argsort(~alive, stable=True)[:size].sort().values


class PolicySampler:
    """A `mmrl.training.recipe.Sampler` that samples from the policy itself, in the training process.

    Args:
        config: lengths, temperature and truncation.
        keep: how much of the prefill to keep for the update.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(self, config: SamplerConfig, keep: KeepPrefill = KeepPrefill.NOTHING) -> None:
        check_config(config, "sampler")
        self.config = config
        self.keep = keep
        self._policy: VlmPolicy | None = None

    def load(self, weights: VlmPolicy, version: int) -> None:
        """Sample from this policy; it is not copied, so its weights are always current."""
        self._policy = weights

    def sample(self, tasks: Sequence[Prompt], n: int, streams: Streams) -> Samples:
        """Draw n responses to each prompt."""
        if self._policy is None:
            raise RuntimeError("this sampler has no weights yet; call load(policy, version) first")
        # numbers for the longest response, used or not, so that no draw depends on the length of another response
        draws = streams.uniform(len(tasks), n, self.config.max_new_tokens)
        return sample(self._policy, tasks, n, self.config, draws, keep=self.keep)

    def close(self) -> None:
        """Do nothing: the sampler does not own the policy."""


def sample(
    policy: VlmPolicy,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: SamplerConfig,
    draws: torch.Generator | Tensor | None,
    *,
    keep: KeepPrefill = KeepPrefill.NOTHING,
    limits: Sequence[int] | None = None,
) -> Samples:
    """Draw responses.

    Args:
        policy: the model; it samples in evaluation mode, and its mode is restored afterwards.
        prompts: N prompts.
        samples_per_prompt: G.
        config: lengths, temperature and truncation; assumed valid (`mmrl.fields.check_config`).
        draws: CPU generator for N * G * max_new_tokens uniform numbers, or these numbers (N * G, max_new_tokens) in
            [0, 1), or None to decode greedily; the temperature still applies to the recorded log-probabilities.
        keep: how much of the prefill to keep in `policy.prefixes`.
        limits: maximum response length for each prompt; default and upper bound are config.max_new_tokens.

    Returns:
        The responses of prompt 0, then those of prompt 1, and so on, on the policy's device.

    Raises:
        UserError: there are no prompts, or samples_per_prompt is below 1.
    """
    if not prompts or samples_per_prompt < 1:
        raise UserError(f"there is nothing to sample: {len(prompts)} prompts, {samples_per_prompt} samples each")
    total = len(prompts) * samples_per_prompt
    if isinstance(draws, torch.Generator):
        draws = torch.rand(total, config.max_new_tokens, generator=draws)
    return fill(GenerationState(policy, config, total, draws, limits), prompts, samples_per_prompt, keep)


def fill(state: GenerationState, prompts: Sequence[Prompt], samples_per_prompt: int, keep: KeepPrefill) -> Samples:
    """Draw the responses of a `GenerationState`."""
    policy = state.policy
    training = policy.training
    policy.eval()  # checkpointed layers drop the cache in training mode
    try:
        # `_read_prompts` alone enables gradients, if the prefill is kept with its graph
        with torch.no_grad(), in_blocks(policy.model):
            _sample_groups(state, prompts, samples_per_prompt, keep)
    finally:
        policy.train(training)
    return state.collect([prompt for prompt in prompts for _ in range(samples_per_prompt)])


def _sample_groups(state: GenerationState, prompts: Sequence[Prompt], group: int, keep: KeepPrefill) -> None:
    """Read the prompts once, then decode the samples of those read together, at most `batch_rows` at a time."""
    policy, most = state.policy, state.config.batch_rows
    # a prefix with history has to be kept as a whole: one backward pass goes through it
    together = len(prompts) if keep is KeepPrefill.GRAPH else max(most // group, 1)
    order, lengths = list(range(len(prompts))), torch.tensor([len(prompt) for prompt in prompts])
    if not policy.reader.joins(policy):  # by length, so that prompts that are read together need little padding
        order.sort(key=lambda number: len(prompts[number]))
    for first in range(0, len(prompts), together):
        chosen = order[first : first + together]
        with stopwatch("prefill"):
            prefix = _read_prompts(policy, [prompts[number] for number in chosen], keep)
        with stopwatch("decode"):
            for part in prefix.parts:
                numbers = torch.tensor(chosen)[part.numbers.cpu()] * group
                # whole groups where they fit, so that few prompts are read by two chunks
                for chunk in torch.arange(len(numbers) * group).split(max(most - most % group, min(most, group))):
                    rows = numbers[chunk // group] + chunk % group
                    _decode_rows(state, part, chunk // group, rows, lengths[rows // group])


def _read_prompts(policy: VlmPolicy, prompts: Sequence[Prompt], keep: KeepPrefill) -> Prefix:
    """Compute the prefix of the prompts; keep what the policy can reuse."""
    with torch.set_grad_enabled(keep is KeepPrefill.GRAPH):
        prefix = policy.encode_prefix(prompts)
    if keep is not KeepPrefill.NOTHING:
        policy.prefixes.keep(prompts, prefix if keep is KeepPrefill.GRAPH else prefix.detach())
    return prefix.detach()


def _decode_rows(state: GenerationState, part: CachedPart, prompt: Tensor, rows: Tensor, lengths: Tensor) -> None:
    """Decode the rows (b,) after the prompts `prompt` (b,) of a part, which have these lengths; all on the CPU."""
    policy = state.policy
    decoder = make_decoder(policy, policy.reader, part, prompt)
    decode(state, decoder, rows, state.budget(rows, lengths), part.last_state[to_device(prompt, policy.device)])


def sample_by(
    policy: VlmPolicy,
    prompts: Sequence[Prompt],
    config: SamplerConfig,
    uniforms: Tensor,
    decoder_of: Callable[..., tuple[Any, Any]],
    *others: Sequence[Any],
) -> Samples:
    """Draw one response to each prompt with a custom decoder.

    Args:
        policy: the model that reads the prompts.
        prompts: N prompts.
        config: lengths, temperature and truncation.
        uniforms: (N, max_new_tokens) in [0, 1).
        decoder_of: function (part of the policy's prefix, part of each of `others`) that returns a decoder of
            these prompts and its first states.
        others: parts of further prefixes of the same prompts.
    """
    state, training = GenerationState(policy, config, len(prompts), uniforms), policy.training
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    policy.eval()
    try:
        with torch.no_grad(), in_blocks(policy.model):
            own_parts = policy.encode_prefix(prompts).detach().parts
            for parts in zip(own_parts, *others, strict=True):
                numbers = parts[0].numbers.cpu()
                for chunk in torch.arange(len(numbers)).split(config.batch_rows):
                    own, *rest = (part.select(to_device(chunk, policy.device)) for part in parts)
                    decoder, first = decoder_of(own, *rest)
                    decode(state, decoder, numbers[chunk], state.budget(numbers[chunk], lengths[numbers[chunk]]), first)
    finally:
        policy.train(training)
    return state.collect(prompts)
