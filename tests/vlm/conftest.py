from pathlib import Path

import pytest
import torch

from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy.countdown import build_model
from mmrl.vlm.toy.tiny import FAMILIES, build_tiny_vlm
from tests.vlm.builders import CORPUS

# a model this small is slower on several threads, and many times slower where another process uses the cores
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model folder of each family; weights large enough that attention is far from uniform."""
    root = tmp_path_factory.mktemp("tiny")
    return {
        family: build_tiny_vlm(
            root / family, family=family, corpus=CORPUS, vision_depth=2, initializer_range=0.15, max_positions=512
        )
        for family in FAMILIES
    }


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3, which reads text alone."""
    return build_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="session")
def policies(tiny_folders: dict[str, Path]) -> dict[str, VlmPolicy]:
    """A loaded policy of each family; tests that change weights load their own."""
    return {family: load_policy(ModelConfig(path=str(path))) for family, path in tiny_folders.items()}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(family: str, tiny_folders: dict[str, Path]) -> Path:
    return tiny_folders[family]


@pytest.fixture
def policy(family: str, policies: dict[str, VlmPolicy]) -> VlmPolicy:
    """The shared policy of the family, unchanged."""
    return policies[family]
