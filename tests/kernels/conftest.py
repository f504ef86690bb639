import pytest


@pytest.fixture(autouse=True)
def fast_kernels(monkeypatch):
    """These tests hold fast paths to their definitions, so that they choose between them themselves."""
    monkeypatch.setenv("VITKIT_KERNELS", "fast")
