"""What the arms of `mmrl bench vlm` work on: a random model of a real architecture and prompts of an exact length."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.errors import UserError

__all__ = [
    "ATTENTION_GAIN",
    "MODELS",
    "Shape",
    "build_model",
    "checksum_reward",
    "half_dead_reward",
    "questions_file",
    "shape_of",
    "suppressed_tokens",
]

ATTENTION_GAIN = 3.0
"""Factor on query and key weights: the late tokens of a 288-token prompt then attend to 130-150 tokens (exponential of
the entropy), with plain random weights to all of them."""
QUESTIONS = 4

MODELS: dict[str, dict[str, Any]] = {
    "quick": {"hidden": 48, "layers": 2, "vision_depth": 2, "vocab_size": 400, "max_positions": 512},
    "21m": {
        "hidden": 384,
        "layers": 6,
        "heads": 6,
        "kv_heads": 2,
        "intermediate": 1536,
        "vision_hidden": 256,
        "vision_depth": 3,
        "vision_heads": 4,
        "vision_intermediate": 1024,
        "full_attention": [2],
        "vocab_size": 8192,
        "max_pixels": 2**20,
        "initializer_range": 0.02,
    },
    "3b": {
        "hidden": 2048,
        "layers": 36,
        "heads": 16,
        "kv_heads": 2,
        "intermediate": 11008,
        "vision_hidden": 1280,
        "vision_depth": 32,
        "vision_heads": 16,
        "vision_intermediate": 3420,
        "full_attention": [7, 15, 23, 31],
        "vocab_size": 8192,
        "embedding_rows": 151936,
        "max_pixels": 2**20,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    },
}
MODELS["21m-64k"] = MODELS["21m"] | {"embedding_rows": 65536}
"""Options of `build_tiny_vlm`; 21m has 21.0 million weights, 3b the sizes of Qwen2.5-VL-3B."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one group."""

    grid: tuple[int, int]
    """Image tokens along height and width."""
    prompt: int
    """Tokens of the prompt P, image and text."""
    completion: int
    """Tokens of each completion T."""
    group: int = 8
    """Completions of the prompt G."""

    @property
    def image_tokens(self) -> int:
        """Tokens of the image."""
        return self.grid[0] * self.grid[1]


def shape_of(options: dict[str, Any]) -> Shape:
    """Shape that travelled as JSON."""
    return Shape(**options | {"grid": (options["grid"][0], options["grid"][1])})


def build_model(folder: Path, family: str, size: str) -> Path:
    """Build the model of the benchmark unless it is there.

    Args:
        folder: where the benchmark keeps what it builds.
        family: row of `mmrl.vlm.tiny.FAMILIES`.
        size: row of `MODELS`.

    Returns:
        The model folder, named after family, size and options.
    """
    import hashlib

    from mmrl.vlm.tiny import build_tiny_vlm

    options = MODELS[size] | {"attention_gain": ATTENTION_GAIN}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{family}-{size}-{digest}"
    if not (path / "config.json").is_file():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        build_tiny_vlm(unfinished, family=family, corpus=_corpus(options["vocab_size"]), **options)
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    return path


def questions_file(folder: Path, model: Path, shape: Shape) -> Path:
    """Write a few questions whose prompts have exactly `shape.prompt` tokens, unless they are there.

    Args:
        folder: where the benchmark keeps what it builds.
        model: model folder; its processor counts the tokens.
        shape: image grid and prompt length.

    Returns:
        A JSON Lines file with columns problem, answer and images, the images beside it.

    Raises:
        UserError: the prompt is too short for the image and the chat markup.
    """
    import numpy as np
    from PIL import Image

    grid = f"{shape.grid[0]}x{shape.grid[1]}"
    path = folder / f"{model.name}-{grid}-{shape.prompt}" / "questions.jsonl"
    if path.is_file():
        return path
    processor, cell = _processor_and_cell(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    for index in range(QUESTIONS):
        height, width = shape.grid[0] * cell, shape.grid[1] * cell
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.save(path.parent / f"{index}.png")
        text = _text_of_length(processor, image, shape)
        lines.append({"id": str(index), "problem": f"<image>{text}", "answer": "", "images": [f"{index}.png"]})
    path.write_text("".join(json.dumps(line | {"answer": "0"}) + "\n" for line in lines), encoding="utf-8")
    return path


def checksum_reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A cheap reward that differs between responses: the sum of the characters' codes modulo 7, over 6."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def half_dead_reward(prompts: list[Any], completions: list[str], *, id: list[str], **columns: Any) -> list[float]:
    """`checksum_reward` where the question's number is even; the others get the same reward for every completion."""
    alive = [int(number) % 2 == 0 for number in id]
    return [value if live else 0.5 for value, live in zip(checksum_reward(prompts, completions), alive, strict=True)]


def suppressed_tokens(model: str, tokenizer: Any) -> list[int]:
    """Tokens that no arm may sample, so that every completion has exactly T tokens: ends of turn and image markup."""
    from mmrl.vlm.special_tokens import BANNED_TOKENS

    config = json.loads((Path(model) / "generation_config.json").read_text(encoding="utf-8"))
    ends = config["eos_token_id"]
    markup = [tokenizer.convert_tokens_to_ids(token) for token in BANNED_TOKENS]
    return sorted({*(ends if isinstance(ends, list) else [ends]), *markup})


def _corpus(vocab_size: int) -> list[str]:
    """Made-up words, enough of them that the tokenizer fills its vocabulary."""
    import random

    rng = random.Random(0)
    syllables = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 4))) for _ in range(vocab_size)]
    return [" ".join(rng.choices(syllables, k=8)) for _ in range(2 * vocab_size)]


def _processor_and_cell(model: Path) -> tuple[Any, int]:
    """Processor and the side in pixels of what one image token stands for."""
    from mmrl.vlm.processing import load_processor

    processor = load_processor(str(model))
    images = processor.image_processor
    return processor, int(images.patch_size) * int(images.merge_size)


def _text_of_length(processor: Any, image: Any, shape: Shape) -> str:
    """Digits, which are a token each, until the prompt has its length."""

    def count(digits: int) -> int:
        content = [{"type": "image"}, {"type": "text", "text": "7" * digits}]
        messages = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(processor(text=[text], images=[image], return_tensors="pt")["input_ids"][0])

    missing = shape.prompt - count(1) + 1
    if missing < 1:
        raise UserError(f"a prompt of {shape.prompt} tokens has no room for {shape.image_tokens} image tokens and text")
    if count(missing) != shape.prompt:
        raise UserError(
            f"the prompt has {count(missing)} tokens, wanted are {shape.prompt}; is this another tokenizer?"
        )
    return "7" * missing
