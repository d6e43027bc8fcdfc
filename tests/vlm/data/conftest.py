import pytest

from tests.vlm.data.rows import png


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, colour in (("red.png", "red"), ("blue.png", "blue")):
        (tmp_path / name).write_bytes(png(colour))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cache(folder, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
