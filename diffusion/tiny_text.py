"""Tiny text encoders and tokenizers of the released classes, the tokenizers trained on a corpus of captions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mmrl.errors import UserError

CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
CLIP_WORD_END = "</w>"
T5_PAD, T5_END, T5_UNKNOWN, T5_SPACE = "<pad>", "</s>", "<unk>", "▁"


def clip_text_model(
    tokenizer: Any, width: int, layers: int, heads: int, tokens: int, *, projection: int | None = None
) -> Any:
    """Build a random CLIP text encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=tokens,
        projection_dim=projection or width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModel(config) if projection is None else CLIPTextModelWithProjection(config)
    _spread_embeddings(model)
    return model.eval()


def t5_text_model(tokenizer: Any, width: int, layers: int, heads: int) -> Any:
    """Build a random T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval()


def _spread_embeddings(model: Any) -> None:
    """Draw token embeddings so large that prompts differ; at the usual 0.02 all of them look alike."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("token_embedding.weight"):
                weight.normal_(0.0, 1.0)
            elif name.endswith("position_embedding.weight"):
                weight.normal_(0.0, 0.3)


def clip_tokenizer(corpus: Sequence[str], vocab_size: int, max_tokens: int) -> Any:
    """Train a CLIP tokenizer: byte-level BPE with an end-of-word mark, start and end tokens last."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*alphabet, *(symbol + CLIP_WORD_END for symbol in alphabet)]
    room = vocab_size - len(symbols) - 2
    if room < 0:
        raise UserError(f"vocab_size={vocab_size} is too small: CLIP's bytes and marks are {len(symbols) + 2} tokens")
    core = CLIPTokenizer().backend_tokenizer
    words = Counter(
        word for text in corpus for word, _ in core.pre_tokenizer.pre_tokenize_str(core.normalizer.normalize_str(text))
    )
    merges = learn_merges(words, room)
    tokens = dict.fromkeys([*symbols, *map("".join, merges), CLIP_START, CLIP_END])
    pairs: Any = merges
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=max_tokens)


def learn_merges(words: Mapping[str, int], most: int) -> list[tuple[str, str]]:
    """Learn byte-pair merges; ties are broken by spelling, so that equal words give equal merges.

    The trainer of the tokenizers library numbers end-of-word symbols in the order of a hash table, differently in
    every process.
    """
    spelled = {word: [*word[:-1], word[-1] + CLIP_WORD_END] for word in sorted(words)}
    merges: list[tuple[str, str]] = []
    while len(merges) < most:
        pairs = Counter[tuple[str, str]]()
        for word, parts in spelled.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        spelled = {word: _joined(parts, best) for word, parts in spelled.items()}
    return merges


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def t5_tokenizer(corpus: Sequence[str], vocab_size: int) -> Any:
    """Count a T5 tokenizer: a unigram model of the corpus's words, and its characters for all other words."""
    from transformers import T5Tokenizer

    counts = Counter(word for text in corpus for word in re.findall(r"\S+", text))
    characters = sorted({character for word in counts for character in word} | set(map(chr, range(33, 127))))
    total = sum(counts.values()) + 1
    special = [(token, 0.0) for token in (T5_PAD, T5_END, T5_UNKNOWN)]
    # a word's own piece beats its characters, whatever its length
    single = [(character, -math.log(total) - 10.0) for character in [T5_SPACE, *characters]]
    room = max(vocab_size - len(special) - len(single), 0)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:room]
    words = [(T5_SPACE + word, math.log(count / total)) for word, count in ranked]
    return T5Tokenizer(vocab=[*special, *single, *words], extra_ids=0)
