from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion.toy.pipelines.tiny import build_tiny_sd3
from tests.diffusion.builders import CAPTIONS, SIZES, build_flux, load_sd3

# a model this small is slower on several threads, and many times slower where another process uses the cores
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 3 pipeline folder."""
    return build_tiny_sd3(tmp_path_factory.mktemp("diffusion") / "sd3", corpus=CAPTIONS, sizes=SIZES)


@pytest.fixture(scope="session")
def shared_pipeline(folder: Path) -> Any:
    return load_sd3(folder)


@pytest.fixture
def sd3(shared_pipeline: Any) -> Any:
    """The pipeline, unchanged; tests that change one load their own."""
    return shared_pipeline


@pytest.fixture(scope="session")
def shared_flux() -> Any:
    return build_flux()


@pytest.fixture(params=["sd3", "flux"])
def pipeline(request: pytest.FixtureRequest, shared_pipeline: Any, shared_flux: Any) -> Any:
    """A pipeline of each kind, unchanged."""
    return shared_pipeline if request.param == "sd3" else shared_flux
