"""Decoding through the modules of transformers, for models that the lean decoder does not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.vlm.generation import GenerationState
from mmrl.vlm.packing import PromptTable, pack_rows
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.vision import gather_features


def fill_cache(policy: VlmPolicy, prompts: Sequence[Prompt], table: PromptTable) -> tuple[Any, Tensor]:
    """Key-value cache of N prompts, read through the modules, and the states (N, H) of their last tokens."""
    from transformers import DynamicCache

    network = policy.network
    own = torch.arange(len(prompts), device=policy.device)
    nothing = torch.zeros((len(prompts), 0), dtype=torch.int64, device=policy.device)
    packed = pack_rows(table, own, nothing, torch.zeros_like(own), policy.pad_id)
    embeddings, extra = policy.embed(packed, gather_features(network.model, prompts, policy.features))
    cache = DynamicCache(config=network.config.text_config)
    output = network.model.language_model(
        inputs_embeds=embeddings, position_ids=packed.positions, past_key_values=cache, use_cache=True, **extra
    )
    return cache, output.last_hidden_state[own, table.lengths - 1]


class ModuleDecoder:
    """Rows that the transformers modules decode together: their cache, positions and which cached columns they see."""

    def __init__(self, state: GenerationState, table: PromptTable, prompt: Tensor, cache: Any) -> None:
        self.policy = state.policy
        self.cache = cache
        self.read = 0
        self.width = table.ids.shape[1]
        self.next_position = table.next_position[prompt]
        self.visible: Tensor | None = None
        if not bool((table.lengths == self.width).all()):  # hide the padding between prompt and response
            columns = torch.arange(self.width + state.config.max_new_tokens, device=prompt.device)[None]
            self.visible = (columns < table.lengths[prompt][:, None]) | (columns >= self.width)

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self.cache.batch_select_indices(index)
        self.next_position = self.next_position[index]
        self.visible = None if self.visible is None else self.visible[index]

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""
        network = self.policy.network
        position = self.next_position + self.read
        self.read += 1
        output = network.model.language_model(
            inputs_embeds=network.get_input_embeddings()(token[:, None]),
            position_ids=position[None, :, None].expand(3, -1, -1),
            attention_mask=None if self.visible is None else self.visible[:, : self.width + self.read],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self.policy.next_logp(states, temperature)
