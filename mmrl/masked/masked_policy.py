"""The policy of a masked-diffusion language model, and bounds on its log-likelihoods.

The network is a transformers decoder with all-to-all attention: the state at a position predicts the token at that
position, given the question and all unmasked tokens of the answer. An answer always has L tokens; those after its first
end token are padding, which the model fills in as well.

Source: Nie et al., LLaDA, arXiv 2502.09992.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.blocks.foreign import HINTED
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import per_row, take_rows, to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.model.model_config import ModelConfig

OUTPUTS = frozenset({"logp", "entropy"})


@dataclass(kw_only=True)
class MaskedPayload(VlmPayload):
    """Prompts of N groups and responses of B rows with L tokens each."""

    response_ids: Tensor = per_row()
    """(B, L) int64, the tokens of each response, including padding."""
    hidden: Tensor = per_row()
    """(B, n, L) bool, the tokens that each of n draws masks for scoring; with n = 0 the whole response is masked."""
    length: Tensor = per_row()
    """(B,) int64, tokens of each response up to its first end token."""

    def sampled_tokens(self, mask: Tensor) -> list[list[int]]:
        """The tokens of each response up to its first end token."""
        rows = zip(self.response_ids.tolist(), self.length.tolist(), strict=True)
        return [row[:length] for row, length in rows]


def hide_counts(uniform: Tensor) -> Tensor:
    """Masks (..., L) bool for a bound of the log-likelihood, from draws (..., L + 1) in [0, 1).

    The number of masked tokens is uniform in 1..L and their positions are drawn without replacement, which has a lower
    variance than masking each token independently (LLaDA, eq. 14).
    """
    length = uniform.shape[-1] - 1
    count = 1 + (uniform[..., :1] * length).long().clamp(max=length - 1)
    # the rank of independent draws is a random permutation, so `rank < count` masks without replacement
    rank = uniform[..., 1:].argsort(-1).argsort(-1)
    return rank < count


def with_masks(rollouts: Rollouts, draws: int, groups: int, streams: Streams, purpose: str) -> Rollouts:
    """Rows of sampled responses with their decisions and the masks that they are scored with.

    Args:
        rollouts: B rows, the same number for each of `groups` groups.
        draws: Monte Carlo draws of the bound, a decision each; 0 makes each token a decision.
        groups: number of groups.
        streams: a stream for each group.
        purpose: name of the draws.
    """
    payload = VlmPayload.of(rollouts)
    rows, width = payload.response_ids.shape
    hidden = torch.zeros(rows, 0, width, dtype=torch.bool)
    if draws:
        uniform = streams.uniform(groups, rows // groups * draws, width + 1, purpose=purpose)
        hidden = hide_counts(uniform).view(rows, draws, width)
    device = rollouts.mask.device
    length = rollouts.mask.sum(1).long()
    mask = torch.ones(rows, draws or width, device=device)
    hints = {} if draws else {HINTED: torch.zeros_like(mask)}
    return rollouts.replace(
        mask=mask,
        logp_old=torch.zeros_like(mask),
        payload=MaskedPayload(**vars(payload), hidden=hidden.to(device), length=length),
        extras=rollouts.extras | hints,
    )


class MaskedPolicy(VlmPolicy):
    """A masked-diffusion language model as an actor."""

    model_kind = "masked-diffusion language model"

    def __init__(
        self, model: nn.Module, processor: Any, config: ModelConfig, value_head: nn.Module | None = None
    ) -> None:
        super().__init__(model, processor, config, value_head)
        mask_id = processor.tokenizer.mask_token_id
        if mask_id is None:
            raise UserError(
                f"the tokenizer of {config.path} has no mask token, so the model is not a masked-diffusion model; set "
                "mask_token in tokenizer_config.json, or use recipe: vlm or sft"
            )
        self.mask_id = int(mask_id)
        # A predicted mask token would leave its position masked.
        barred = torch.cat([self.banned_ids, torch.tensor([self.mask_id])]).unique()
        self.register_buffer("banned_ids", barred, persistent=False)

    def padded(self, ids: list[int], length: int) -> list[int]:
        """The first tokens of a given answer, padded to a length with end tokens, which the model fills in as well."""
        end = self.processor.tokenizer.eos_token_id
        return ids[:length] + [self.eos_ids[0] if end is None else int(end)] * (length - len(ids))

    def lengths(self, tokens: Tensor) -> Tensor:
        """(B,) int64, length of responses (B, L) up to and including the first end token; L without one."""
        ends = torch.isin(tokens, torch.tensor(self.eos_ids, device=tokens.device))
        # argmax gives the first of equal values, which is the first end token
        return torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens.shape[1])

    def forward(  # type: ignore[override]
        self, rollouts: Rollouts, *, level: str = "one_step", outputs: frozenset[str] = frozenset({"logp"})
    ) -> PolicyOutputs:
        """Score the response of every row.

        Args:
            rollouts: rows whose payload is a `MaskedPayload`.
            level: one_step scores each token given the question alone, (B, L); tokens given what the first draw leaves,
                (B, L); draws gives one bound of the log-likelihood of the answer for each draw, (B, n).
            outputs: "logp", and "entropy" of the predictions, added up like the log-probabilities.

        Returns:
            Scores float32; with level draws, 0 where the mask of the rollouts is 0.

        Gradient: flows into all trainable weights.
        """
        if not outputs <= OUTPUTS:
            raise ValueError(f"outputs={sorted(outputs)}; a masked policy scores: {', '.join(sorted(OUTPUTS))}.")
        payload = MaskedPayload.of(rollouts)
        tokens, group = payload.response_ids, rollouts.host.group
        if level == "one_step":  # the rows of a group are predicted from the same input
            prompts, masked = payload.prompts, torch.full((len(payload.prompts), tokens.shape[1]), self.mask_id)
            states = take_rows(self.answer_states(prompts, masked), to_device(group, self.device))
            return self._scored(states, tokens, outputs)
        if level == "tokens":
            hidden = payload.hidden[:, 0]
            prompts = [payload.prompts[number] for number in group.tolist()]
            return self._scored(self.answer_states(prompts, tokens.masked_fill(hidden, self.mask_id)), tokens, outputs)
        # Only draws that count are computed: the update cuts draws into chunks by clearing the mask of the others.
        pairs = torch.nonzero(rollouts.host.mask)
        prompts = [payload.prompts[number] for number in group[pairs[:, 0]].tolist()]
        row, draw = to_device(pairs, tokens.device).unbind(1)
        hidden, chosen = payload.hidden[row, draw], tokens[row]
        found = self._scored(self.answer_states(prompts, chosen.masked_fill(hidden, self.mask_id)), chosen, outputs)
        # L / count corrects for the masked fraction, which makes the mean over draws a bound for the whole answer
        scale = hidden / (hidden.sum(1, keepdim=True) / hidden.shape[1])

        def bounds(x: Tensor) -> Tensor:
            return torch.zeros_like(rollouts.mask, dtype=x.dtype).index_put((row, draw), (x * scale).sum(1))

        return PolicyOutputs(bounds(found.logp), None if found.entropy is None else bounds(found.entropy))

    def logits(self, prompts: Sequence[Prompt], answers: Tensor) -> Tensor:
        """Logits (R, L, V) float32 at the responses' positions; see `answer_states`."""
        states = self.answer_states(prompts, answers)
        found = self.head.logits(states.flatten(0, 1)).float().index_fill(1, self.banned_ids, float("-inf"))
        return found.unflatten(0, states.shape[:2])

    def answer_states(self, prompts: Sequence[Prompt], answers: Tensor) -> Tensor:
        """States (R, L, H) at the responses' positions, each predicting the token at its own position.

        Args:
            prompts: R prompts.
            answers: (R, L) int64, tokens of the answers, masked ones included.
        """
        device, length = self.device, answers.shape[1]
        starts = torch.tensor([len(prompt) for prompt in prompts])
        width = int(starts.max()) + length
        ids = torch.full((len(prompts), width), self.pad_id)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt.input_ids
        ids, starts = to_device(ids, device), to_device(starts, device)
        # Padding follows the answer, not the question, so that position numbers have no gap between the two.
        places = starts[:, None] + torch.arange(length, device=device)
        ids = ids.scatter(1, places, to_device(answers, device))
        real = torch.arange(width, device=device) < starts[:, None] + length
        output = self.network.base_model(
            input_ids=ids, attention_mask=self._all_to_all(real), use_cache=False, return_dict=True
        )
        states: Tensor = output.last_hidden_state
        return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))

    def _all_to_all(self, real: Tensor) -> Tensor:
        """Additive mask (R, 1, S, S) that lets every token see all real ones (R, S); replaces the causal mask."""
        dtype = self.network.get_input_embeddings().weight.dtype
        # A 4-dimensional mask, because a (R, S) one would be combined with the decoder's causal mask
        bias = torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill(~real, torch.finfo(dtype).min)
        return bias[:, None, None, :].expand(-1, 1, real.shape[1], -1)

    def _scored(self, states: Tensor, tokens: Tensor, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-probabilities of tokens (R, L), and entropies, from the states (R, L, H) at their positions."""
        found = self.head.logprobs(
            states.flatten(0, 1),
            to_device(tokens, states.device).flatten(),
            temperature=1.0,
            banned=self.banned_ids,
            entropy="entropy" in outputs,
        )
        entropy = None if found.entropy is None else found.entropy.view(tokens.shape)
        return PolicyOutputs(found.logp.view(tokens.shape), entropy)
