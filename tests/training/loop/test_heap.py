"""Free memory between live tensors is returned to the system."""

import os
import subprocess
import sys

import pytest
import torch

from mmrl.training import processes as heap
from mmrl.training.processes import PRIMITIVES, SLACK, HeapTrimmer, limit_primitive_cache

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


COUNT_KERNELS = """
import sys
from mmrl.training.processes import limit_primitive_cache
if sys.argv[1] == "limited":
    limit_primitive_cache()
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
weight = torch.randn(8, 3, 3, 3)
for _ in range(2):
    for size in range(8, 8 + 300):
        torch.nn.functional.conv2d(torch.zeros(16, 3, size, 32), weight)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a torch with oneDNN")
@pytest.mark.slow
def test_kernels_of_shapes_that_do_not_recur_are_dropped() -> None:
    again = {way: _hits_in_second_round(way) for way in ("unlimited", "limited")}
    assert again["unlimited"] >= 300, "all 300 shapes fit into the cache, so each comes back to its kernel"
    assert again["limited"] < 300, f"300 shapes in turns do not fit into {PRIMITIVES} places"


def _hits_in_second_round(way: str) -> int:
    """Kernels that oneDNN found in its cache, as it reports itself."""
    clean = {name: value for name, value in os.environ.items() if "PRIMITIVE_CACHE" not in name}
    command = [sys.executable, "-c", COUNT_KERNELS, way]
    environment = clean | {"ONEDNN_VERBOSE": "profile_create"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.count("create:cache_hit,cpu,convolution")


def test_a_number_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
        monkeypatch.setenv(name, "7")
        limit_primitive_cache()
        assert os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7") == "7"
        monkeypatch.delenv(name)
    limit_primitive_cache()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(PRIMITIVES)
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
