import pytest

from mmrl.agents.environments.environment import ActionConfig
from tests.agents.runs import by_length
from tests.vlm.conftest import folder, language_model, policies, policy, tiny_folders

__all__ = ["family", "folder", "language_model", "policies", "policy", "tiny_folders"]


@pytest.fixture(params=[pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    """One family by default: tests/vlm runs both through the same policy."""
    return request.param


@pytest.fixture
def every_answer_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of an untrained model are actions."""
    monkeypatch.setattr(ActionConfig, "parse", by_length)
