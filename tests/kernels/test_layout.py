"""The memory layout of convolutional networks by processor."""

import pytest
import torch

from vitkit import kernels


@pytest.mark.parametrize(("capability", "in_training"), [("AVX2", True), ("AVX512", False), ("DEFAULT", False)])
def test_maps_are_contiguous_only_in_training_and_without_avx512(monkeypatch, capability, in_training):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(kernels, "_has_only_avx2", kernels._has_only_avx2.__wrapped__)
    images = torch.zeros(1, 3, 8, 8)

    assert (kernels.convolution_layout(images) == torch.contiguous_format) == in_training
    with torch.no_grad():
        assert kernels.convolution_layout(images) == torch.channels_last
    assert kernels.convolution_layout(images.to("meta")) == torch.channels_last
