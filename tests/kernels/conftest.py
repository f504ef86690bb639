import pytest


@pytest.fixture(autouse=True)
def fast_kernels(monkeypatch):
    """Leave the choice of kernels to these tests, which compare fast paths with their definitions."""
    monkeypatch.setenv("VITKIT_KERNELS", "fast")
