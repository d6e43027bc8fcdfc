"""A small CLIP, trained contrastively in seconds on captioned frames of the synthetic clips.

It is an ordinary CLIP folder of transformers: only its size and its data are toy. A flash is captioned with the flash,
a digit with its name, an empty image as such; a question about the digit after the flash captions flashes and, more
rarely, any digit. So its similarities find flashes, and digits, but not which digit follows a flash.

Source: Radford et al., CLIP, arXiv 2103.00020 (symmetric cross-entropy over the pairs of a batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmrl.files import replaced
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.vlm.toy.digit_clips import Shot, clip_frames
from mmrl.vlm.toy.digits import CELL_PX, scan_pool, scans_and_labels
from mmrl.vlm.toy.needles import QUESTIONS

SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")
CAPTIONS = (("the red flash", "a red flash"), ("an empty picture", "nothing"))
DIGIT_CAPTIONS = ("the digit {}", "a handwritten {}", "digit {}")
MEAN, STD = 0.5, 0.25


def build_clip(
    path: str | Path,
    *,
    width: int = 32,
    hidden: int = 48,
    layers: int = 2,
    steps: int = 120,
    examples: int = 60,
    noise: float = 0.1,
    question_rate: float = 0.3,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> Path:
    """Train a small CLIP and save it as a model folder.

    Args:
        path: folder to write.
        width: width of the embeddings.
        hidden: width of both towers, a multiple of 4.
        layers: layers of both towers.
        steps: optimiser steps, each on 16 sets of one flash, one empty image and the ten digits.
        examples: frames drawn of each of these twelve, from the training scans.
        noise: strength of background texture and pixel noise of the frames.
        question_rate: how often a flash is captioned with a question; a digit is a third as often.
        learning_rate: of AdamW.
        seed: of frames, captions and weights.
    """
    ensure_torchvision()
    from transformers import CLIPModel

    rng = np.random.default_rng(seed)
    frames = torch.from_numpy(_draw_frames(rng, examples, noise)).permute(0, 1, 4, 2, 3)
    tokenizer = _make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(_config(len(tokenizer), width, hidden, layers)).train()
        _fit(model, tokenizer, frames, rng, steps, question_rate, learning_rate)
    with replaced(Path(path)) as draft, quiet_transformers():
        model.eval().save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        _image_processor().save_pretrained(draft)
    return Path(path)


def _draw_frames(rng: np.random.Generator, examples: int, noise: float) -> np.ndarray:
    """(12, examples, 56, 56, 3) uint8: flashes, empty images, then the digits."""
    pool = scan_pool("train")
    labels = scans_and_labels()[1][pool]

    def shots(kind: int) -> list[Shot]:
        if kind < 2:
            return [Shot(1, cue=kind == 0)] * examples
        return [Shot(1, int(scan)) for scan in rng.choice(pool[labels == kind - 2], size=examples)]

    seeds = rng.integers(2**31, size=12)
    return np.stack([list(clip_frames(shots(kind), noise=noise, seed=int(seeds[kind]))) for kind in range(12)])


def _fit(
    model: Any,
    tokenizer: Any,
    frames: Tensor,
    rng: np.random.Generator,
    steps: int,
    question_rate: float,
    learning_rate: float,
) -> None:
    """Contrastive training: each set of twelve frames against its twelve captions."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    kinds, sets = torch.arange(12).repeat(16), 16
    for step in range(steps):
        chosen = torch.from_numpy(rng.integers(frames.shape[1], size=len(kinds)))
        pixels = ((frames[kinds, chosen].float() / 255) - MEAN) / STD
        captions = [_caption(rng, kind, question_rate) for kind in kinds.tolist()]
        text = tokenizer(captions, padding=True, return_tensors="pt")
        found = model(input_ids=text.input_ids, attention_mask=text.attention_mask, pixel_values=pixels)
        images, texts = found.image_embeds.unflatten(0, (sets, 12)), found.text_embeds.unflatten(0, (sets, 12))
        logits = (images @ texts.transpose(1, 2)) * model.logit_scale.exp().clamp(max=50)
        target = torch.arange(12).repeat(sets)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target)
        loss = loss + nn.functional.cross_entropy(logits.transpose(1, 2).flatten(0, 1), target)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _caption(rng: np.random.Generator, kind: int, question_rate: float) -> str:
    if rng.random() < (question_rate, 0.0, *[question_rate / 3] * 10)[kind]:
        return str(rng.choice(QUESTIONS))
    return str(rng.choice(CAPTIONS[kind] if kind < 2 else [text.format(kind - 2) for text in DIGIT_CAPTIONS]))


def _words() -> Sequence[str]:
    texts = [*QUESTIONS, *CAPTIONS[0], *CAPTIONS[1], *DIGIT_CAPTIONS, "0 1 2 3 4 5 6 7 8 9 ?"]
    found = " ".join(texts).lower().replace("{}", " ").replace("?", " ? ").split()
    return list(dict.fromkeys(found))


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *_words()])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<start>",
        eos_token="<end>",
        model_max_length=24,
    )


def _config(words: int, width: int, hidden: int, layers: int) -> Any:
    from transformers import CLIPConfig

    tower = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "projection_dim": width,
    }
    text = tower | {
        "vocab_size": words,
        "max_position_embeddings": 24,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    vision = tower | {"image_size": CELL_PX, "patch_size": 14}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=width)


def _image_processor() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(
        size={"shortest_edge": CELL_PX},
        crop_size={"height": CELL_PX, "width": CELL_PX},
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )
