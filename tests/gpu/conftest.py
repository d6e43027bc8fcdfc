"""Tests that need a GPU: `make test-gpu`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Skip where there is no GPU; elsewhere keep convolutions from rounding their float32 inputs to TF32."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that this PyTorch can use")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
