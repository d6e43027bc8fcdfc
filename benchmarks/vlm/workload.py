"""Workload of the vlm benchmarks: a random model of a real architecture and prompts of an exact length."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmrl.errors import UserError
from mmrl.vlm.data.prompt import PromptLayout, encode_prompt
from mmrl.vlm.data.task import VlmTask, read_video_cell

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
"""Options of `build_tiny_vlm`; 21m has 21.0 million parameters, 3b the sizes of Qwen2.5-VL-3B."""
GENERIC_MODELS: dict[str, dict[str, Any]] = {
    "quick": {"max_positions": 512},
    "21m": {name: MODELS["21m"][name] for name in ("hidden", "layers", "heads", "kv_heads", "intermediate")}
    | {"vocab_size": 8192, "max_positions": 4096, "initializer_range": 0.02}
    | {
        "vision": {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 448,
        }
    },
}
"""Options of `build_tiny_generic`, of the same sizes."""
GENERIC = ("smolvlm", "gemma3", "qwen3")
"""Other measured families; the last one is text-only."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one group."""

    grid: tuple[int, int]
    """Image tokens along height and width; (0, 0) for a text-only prompt."""
    prompt: int
    """Tokens of the prompt P, image and text."""
    completion: int
    """Tokens of each completion T."""
    group: int = 8
    """Completions of the prompt G."""
    frames: int = 0
    """Number of frames (even) if the prompt has a video instead of an image; 0 for an image."""

    @property
    def kind(self) -> str:
        """Medium of the prompt: image, video, or empty."""
        return "video" if self.frames else "image" if any(self.grid) else ""

    @property
    def images(self) -> int:
        """Grids that the tower looks at one by one: the image, or each pair of frames."""
        return max(self.frames // 2, 1)

    @property
    def bound(self) -> float:
        """Ratio of tokens through the layers when the prompt is processed per completion to once per group."""
        return self.group * (self.prompt + self.completion) / (self.prompt + self.group * self.completion)

    @property
    def image_tokens(self) -> int:
        """Tokens of the image or video."""
        return self.grid[0] * self.grid[1] * self.images


def shape_of(options: dict[str, Any]) -> Shape:
    """Shape read from JSON."""
    return Shape(**options | {"grid": (options["grid"][0], options["grid"][1])})


def build_model(folder: Path, family: str, size: str, device: str = "cpu") -> Path:
    """Build the model of the benchmark unless it exists.

    Args:
        folder: where the benchmark keeps what it builds.
        family: row of `mmrl.vlm.toy.tiny.FAMILIES`, or one of `GENERIC`.
        size: row of `MODELS` or `GENERIC_MODELS`.
        device: draws the weights; a GPU draws 3.8 billion in a second.

    Returns:
        The model folder, named after family, size and options.
    """
    import hashlib

    import torch

    from mmrl.vlm.toy.tiny import build_tiny_vlm
    from mmrl.vlm.toy.tiny_generic import build_tiny_generic

    build: Any = build_tiny_generic if family in GENERIC else build_tiny_vlm
    options = GENERIC_MODELS[size] if family in GENERIC else MODELS[size] | {"attention_gain": ATTENTION_GAIN}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{family}-{size}-{digest}"
    if not (path / "config.json").is_file():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        with torch.device(device):
            build(unfinished, family=family, corpus=_corpus(options.get("vocab_size", 400)), **options)
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
        if device == "cuda":
            torch.cuda.empty_cache()  # the arms are processes of their own and need the room
    return path


def questions_file(folder: Path, model: Path, shape: Shape) -> Path:
    """Write a few questions whose prompts have exactly `shape.prompt` tokens, unless they exist.

    Args:
        folder: where the benchmark keeps what it builds.
        model: model folder; its processor counts the tokens.
        shape: image grid, frames and prompt length.
    """
    grid = f"{shape.grid[0]}x{shape.grid[1]}" + f"x{shape.frames}" * bool(shape.frames)
    path = folder / f"{model.name}-{grid}-{shape.prompt}" / "questions.jsonl"
    if path.is_file():
        return path
    processor, layout = _processor_and_layout(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for index in range(QUESTIONS):
        medium = _write_medium(path.parent, index, shape, layout) if shape.kind else None
        # digits, so that questions of text alone differ by one
        text = _text_of_length(processor, layout, path.parent, medium, shape, str(index))
        media = {f"{shape.kind}s": [medium]} if shape.kind else {}
        lines.append({"id": str(index), "problem": f"<{shape.kind}>" * bool(media) + text, "answer": "0"} | media)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def checksum_reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A cheap reward that differs between responses: the sum of the characters' codes modulo 7, over 6."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def half_dead_reward(prompts: list[Any], completions: list[str], *, id: list[str], **columns: Any) -> list[float]:
    """`checksum_reward` if the question's number is even; the others get the same reward for every completion."""
    alive = [int(number) % 2 == 0 for number in id]
    return [value if live else 0.5 for value, live in zip(checksum_reward(prompts, completions), alive, strict=True)]


def suppressed_tokens(model: str, tokenizer: Any) -> list[int]:
    """Tokens that no arm may sample, so that every completion has exactly T tokens: ends of turn and image markup."""
    from transformers import AutoConfig

    from mmrl.vlm.families.family import family_of

    ends = json.loads((Path(model) / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    config, vocabulary = AutoConfig.from_pretrained(model), tokenizer.get_vocab()
    family, entries = family_of(config.model_type), config.get_text_config().vocab_size
    markup = {vocabulary[token] for token in family.media_tokens if token in vocabulary} | family.banned(config)
    return sorted({*(ends if isinstance(ends, list) else [ends]), *(token for token in markup if token < entries)})


def _corpus(vocab_size: int) -> list[str]:
    """Made-up words, enough of them that the tokenizer fills its vocabulary."""
    import random

    rng = random.Random(0)
    syllables = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 4))) for _ in range(vocab_size)]
    return [" ".join(rng.choices(syllables, k=8)) for _ in range(2 * vocab_size)]


def _processor_and_layout(model: Path) -> tuple[Any, PromptLayout]:
    """Processor of a model, and what encodes prompts of any length for it."""
    from transformers import AutoConfig

    from mmrl.vlm.families.family import family_of
    from mmrl.vlm.model.processor import load_processor

    config = AutoConfig.from_pretrained(model)
    family = family_of(config.model_type)
    patch, merge, _ = family.sizes(config)
    tables = family.token_tables(SimpleNamespace(config=config, base_model=None))
    return load_processor(str(model)), PromptLayout(patch, 10**9, "", merge, tables)


def _write_medium(folder: Path, index: int, shape: Shape, layout: PromptLayout) -> Any:
    """Write an image or a video of noise; returns the cell that names it."""
    import numpy as np
    from PIL import Image

    from mmrl.hub.video_writing import write_mp4

    merge = max(layout.merge_size, 2)  # towers that do not merge themselves have a layer behind them that does
    height, width = (side * layout.patch_size * merge for side in shape.grid)
    rng = np.random.default_rng(index)
    noise = rng.integers(0, 256, (max(shape.frames, 1), height, width, 3), dtype=np.uint8)
    if not shape.frames:
        Image.fromarray(noise[0]).save(folder / f"{index}.png")
        return f"{index}.png"
    write_mp4(folder / f"{index}.mp4", noise, fps=2)
    size = {"resized_height": height, "resized_width": width}
    return {"path": f"{index}.mp4", "nframes": shape.frames, **size}


def _text_of_length(processor: Any, layout: PromptLayout, folder: Path, medium: Any, shape: Shape, digit: str) -> str:
    """Copies of a digit, which is a token, until the prompt has its length."""

    def count(digits: int) -> int:
        content = [{"type": shape.kind}] * bool(shape.kind) + [{"type": "text", "text": digit * digits}]
        task = VlmTask("counted", [{"role": "user", "content": content}])
        if shape.frames:
            task.videos = [*read_video_cell(medium, folder, "the benchmark")]
        elif shape.kind:
            task.images = [str(folder / medium)]
        return len(encode_prompt(task, processor, layout))

    missing = shape.prompt - count(1) + 1
    if missing < 1:
        raise UserError(f"a prompt of {shape.prompt} tokens has no room for {shape.image_tokens} image tokens and text")
    if count(missing) != shape.prompt:
        raise UserError(
            f"the prompt has {count(missing)} tokens, expected {shape.prompt}; is this a different tokenizer?"
        )
    return digit * missing
