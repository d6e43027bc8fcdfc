import pytest

from tests.compare.lab import Lab


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)
