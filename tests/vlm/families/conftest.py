from pathlib import Path

import pytest

from mmrl.vlm.toy.tiny_generic import build_tiny_generic
from tests.vlm.builders import CORPUS

KINDS = ("smolvlm", "gemma3", "qwen3")


@pytest.fixture(scope="session")
def tiny_generic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved tiny models of other families than Qwen-VL."""
    root = tmp_path_factory.mktemp("generic")
    return {kind: build_tiny_generic(root / kind, family=kind, corpus=CORPUS) for kind in KINDS}
