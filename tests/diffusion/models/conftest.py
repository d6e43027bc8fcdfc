import copy

import pytest
import torch

from diffusion.models.pipelines import load_pipeline
from tests.diffusion.builders import CAPTIONS, FLUX_SIZES
from tests.diffusion.models.policies import config_of
from tests.diffusion.tiny_flux import build_tiny_flux


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory):
    return build_tiny_flux(tmp_path_factory.mktemp("policy") / "flux", corpus=CAPTIONS, sizes=FLUX_SIZES)


@pytest.fixture(scope="module")
def opened():
    return {}


@pytest.fixture
def loads_each_folder_once(monkeypatch, opened, folder, flux_folder):
    """A policy with a new transformer and cached other parts, since most tests change only the transformer."""

    def load(path, dtype=torch.float32, family=None):
        if path not in (str(folder), str(flux_folder)):
            return load_pipeline(path, dtype)
        if (path, dtype) not in opened:
            opened[path, dtype] = load_pipeline(path, dtype)
        pipeline = opened[path, dtype]
        fresh = type(pipeline)(**pipeline.components | {"transformer": copy.deepcopy(pipeline.transformer)})
        fresh.set_progress_bar_config(disable=True)
        return fresh

    monkeypatch.setattr("diffusion.models.diffusion_policy.load_pipeline", load)


@pytest.fixture(params=["sd3", "flux"])
def base(request, folder, flux_folder):
    return folder if request.param == "sd3" else flux_folder


@pytest.fixture(params=["lora", "full"])
def config(request, base):
    return config_of(base, enabled=request.param == "lora")
