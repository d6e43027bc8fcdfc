import pytest


@pytest.fixture
def no_charts():
    """Reports of these tests have their charts."""
