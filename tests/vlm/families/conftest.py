from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.hub.compat import ensure_torchvision
from mmrl.vlm.toy.tiny_generic import build_tiny_generic
from tests.vlm.builders import CORPUS

KINDS = ("smolvlm", "gemma3", "qwen3")


@pytest.fixture(scope="session")
def tiny_generic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved tiny models of the generic lane."""
    root = tmp_path_factory.mktemp("generic")
    ensure_torchvision()
    from transformers.models.smolvlm import processing_smolvlm

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(processing_smolvlm, "num2words", str)
        return {kind: build_tiny_generic(root / kind, family=kind, corpus=CORPUS) for kind in KINDS}


@pytest.fixture
def words_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor writes lengths of videos in words, with a package that images do not need."""
    ensure_torchvision()
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", str)
