"""Free memory between live tensors goes back to the system."""

from __future__ import annotations

import pytest
import torch

from mmrl.training.loop import heap
from mmrl.training.loop.heap import SLACK, HeapTrimmer

needs_glibc = pytest.mark.skipif(heap._malloc_trim() is None, reason="needs glibc's malloc_trim and /proc")
KIB_16 = 4096
"""Floats of 16 KiB: too small for pages of their own, large enough to hold whole ones."""


def _blocks(mebibytes: int) -> list[torch.Tensor]:
    return [torch.ones(KIB_16) for _ in range(mebibytes * 64)]


@needs_glibc
def test_every_second_freed_block_goes_back() -> None:
    trimmer = HeapTrimmer()
    trimmer.trim()
    before = heap._resident_bytes()
    blocks = _blocks(1024)
    del blocks[::2]
    full = heap._resident_bytes()
    assert trimmer.trim()
    left = heap._resident_bytes()
    assert full - before > 900 << 20, "the free blocks were still held"
    assert left - before < 760 << 20, "half of the blocks live, and up to a page of each free one stays"
    assert all(float(block.sum()) == KIB_16 for block in blocks)


@needs_glibc
def test_a_process_that_has_not_grown_is_left_alone() -> None:
    trimmer = HeapTrimmer()
    assert trimmer.trim()
    kept = _blocks(SLACK // 4 >> 20)
    assert not trimmer.trim()
    assert kept


def test_switched_off_it_never_trims() -> None:
    assert not HeapTrimmer(enabled=False).trim()
