from tests.vlm.conftest import language_model, tiny_folders

__all__ = ["language_model", "tiny_folders"]
