from tests.agents.conftest import family, folder, policies, policy, tiny_folders

__all__ = ["family", "folder", "policies", "policy", "tiny_folders"]
