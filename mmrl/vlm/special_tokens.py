"""Tokens that end a response, and tokens that must never be sampled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError

BANNED_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")


def eos_ids(network: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: those of the generation config, then the tokenizer's."""
    found = getattr(network.generation_config, "eos_token_id", None)
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError("neither generation_config.json nor the tokenizer names an end-of-turn token")
    return tuple(dict.fromkeys(ids))


def banned_ids(network: Any, tokenizer: Any) -> Tensor:
    """Ids that may never be sampled: image markup breaks the next forward pass, unused ids have no text."""
    vocabulary = tokenizer.get_vocab()
    ids = {vocabulary[token] for token in BANNED_TOKENS if token in vocabulary}
    ids |= {network.config.image_token_id, network.config.video_token_id}
    ids |= set(range(len(tokenizer), network.config.text_config.vocab_size))
    return torch.tensor(sorted(ids), dtype=torch.int64)
