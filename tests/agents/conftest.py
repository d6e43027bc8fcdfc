from tests.vlm.conftest import family, folder, policies, policy, tiny_folders

__all__ = ["family", "folder", "policies", "policy", "tiny_folders"]
