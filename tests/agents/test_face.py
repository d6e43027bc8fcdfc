"""The names that `mmrl.agents` and `mmrl.gui` offer exist where they say."""

import importlib

import pytest


@pytest.mark.parametrize("package", ["mmrl.agents", "mmrl.gui"])
def test_every_name_of_the_face_loads(package):
    face = importlib.import_module(package)
    assert all(getattr(face, name).__module__.startswith("mmrl") for name in face.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        face.Nothing  # noqa: B018
