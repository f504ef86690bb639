from types import SimpleNamespace

import numpy as np
import torch

from vitkit.apps.explanations.pages import sampling_page


def test_samples_outside_of_the_image_are_left_out():
    locations = torch.tensor([[0.01, 0.01], [0.99, 0.99], [1.3, 0.5], [-0.2, 0.5]]).view(1, 1, 4, 2)
    layer = SimpleNamespace(locations=locations, weights=torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 1, 4))
    queries = SimpleNamespace(
        labels=torch.tensor([0]), scores=torch.tensor([0.5]), boxes_xyxy=torch.tensor([[0.0, 0, 1, 1]])
    )
    sampling = SimpleNamespace(
        image=np.zeros((40, 40, 3), np.uint8), classes=["cat"], queries=queries, layers=lambda query: [layer]
    )
    (page,) = sampling_page(sampling, [0])
    weights = page.weights[0, 0]
    assert torch.equal(weights[[0, -1]], torch.tensor([0.1, 0.2])) and torch.isclose(weights.sum(), torch.tensor(0.3))
