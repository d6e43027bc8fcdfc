"""Chunks of a worked answer as given tokens of an answer that is to be filled in.

Source: IGPO (inpainting-guided), arXiv 2509.10396; facebookresearch/igpo utils/generate.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.masked.masked_config import InpaintingConfig

Chunk = tuple[int, int]
"""First token, and the one after the last."""


def hinted_answer(
    trace: Sequence[int], length: int, mask_id: int, config: InpaintingConfig, generator: torch.Generator
) -> list[int]:
    """An answer of masked tokens with random chunks of a worked answer in it.

    Args:
        trace: tokens of the worked answer, without an end token.
        length: tokens L of an answer.
        mask_id: the mask token.
        config: sizes and fractions of chunks.
        generator: draws the chunks' sizes, the fraction that is given, and which ones.

    Returns:
        L tokens.
    """
    trace = trace[: max(length - config.free, 0)]
    chunks = cut(len(trace), config.min_chunk, config.max_chunk, generator)
    share = config.low + (config.high - config.low) * float(torch.rand((), generator=generator))
    order = torch.randperm(len(chunks), generator=generator).tolist()
    given = [chunks[number] for number in sorted(order[int(len(chunks) * (1.0 - share)) :])]
    return with_chunks(trace, given, length, mask_id, config)


def with_chunks(
    trace: Sequence[int], chunks: Sequence[Chunk], length: int, mask_id: int, config: InpaintingConfig
) -> list[int]:
    """L masked tokens with chunks of a worked answer in them."""
    room = max(length - config.free, 0)
    stretch = min(max(1.0, room / max(len(trace), 1)), config.stretch)
    answer = [mask_id] * length
    for (start, _), (first, stop) in zip(chunks, place(chunks, room, stretch, config.max_gap), strict=False):
        answer[first:stop] = trace[start : start + stop - first]
    return answer


def cut(length: int, smallest: int, largest: int, generator: torch.Generator) -> list[Chunk]:
    """Chunks of random sizes one after another; a remainder below the smallest size is left out."""
    chunks: list[Chunk] = []
    start = 0
    while start < length:
        size = min(int(torch.randint(smallest, largest + 1, (), generator=generator)), length - start)
        if size < smallest:
            break
        chunks.append((start, start + size))
        start += size
    return chunks


def place(chunks: Sequence[Chunk], room: int, stretch: float, max_gap: int) -> list[Chunk]:
    """Positions of chunks in an answer: gaps grow by `stretch` up to `max_gap`, and the excess is cut off.

    Returns:
        Fewer chunks than given if there is no room for the last ones.
    """
    placed: list[Chunk] = []
    end = 0
    for start, stop in chunks:
        gap = int((start - end) * stretch)
        first = min(gap, max_gap) + placed[-1][1] if placed else gap
        if first >= room:
            break
        placed.append((first, min(first + stop - start, room)))
        end = stop
    return placed
