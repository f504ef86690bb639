import pytest

from vitkit.kernels import use_kernels


@pytest.fixture(autouse=True)
def fast_kernels():
    """Leave the choice of kernels to these tests, which compare fast paths with their definitions."""
    with use_kernels("fast"):
        yield
