import pytest

from tests.vlm.conftest import folder, language_model, policies, policy, tiny_folders

__all__ = ["family", "folder", "language_model", "policies", "policy", "tiny_folders"]


@pytest.fixture(params=[pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    """One family by default: tests/vlm runs both through the same policy."""
    return request.param
