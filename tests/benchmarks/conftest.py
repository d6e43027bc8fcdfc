import pytest
import torch

from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy.tiny import FAMILIES, build_tiny_vlm
from tests.vlm.builders import CORPUS

# a model this small is slower on several threads, and many times slower where another process uses the cores
torch.set_num_threads(1)


@pytest.fixture(scope="session", params=list(FAMILIES))
def policy(request, tmp_path_factory):
    """A tiny policy of each family; on a CPU, PyTorch counts only the operations of eager attention."""
    path = tmp_path_factory.mktemp("bench") / request.param
    build_tiny_vlm(path, family=request.param, corpus=CORPUS, vision_depth=2, vision_heads=2, max_positions=512)
    return load_policy(ModelConfig(path=str(path), attention="eager"))
