from tests.vlm.conftest import family, folder, language_model, tiny_folders

__all__ = ["family", "folder", "language_model", "tiny_folders"]
