"""The gradient of the selection of locations."""

import torch

from vitkit.nn.deformable_transformer import Levels
from vitkit.nn.query_selection import LocationSelection


def test_recomputed_selection_has_the_values_and_gradients_of_all_locations():
    torch.manual_seed(0)
    selection = LocationSelection("test", 16, 5)
    shapes = [(8, 8), (4, 4)]
    memory = torch.randn(2, 80, 16, requires_grad=True)
    levels = Levels(memory, None, shapes, None, torch.ones(1, 2, 2))
    predictions, queries = selection(memory, levels, 10)
    with torch.no_grad():
        inferred, inferred_queries = selection(memory, levels, 10)

    torch.testing.assert_close(predictions["pred_logits"], inferred["pred_logits"])
    torch.testing.assert_close(queries.content, inferred_queries.content)

    weights = torch.randn(2, 10, 5)
    parameters = [memory, *selection.enc_output.parameters(), *selection.class_embed.parameters()]
    gradients = torch.autograd.grad((predictions["pred_logits"] * weights).sum(), parameters)
    # All locations are computed, and those selected are found by their logits.
    logits = selection.class_embed(selection.enc_output_norm(selection.enc_output(memory)))
    distances = (logits.detach()[:, :, None] - predictions["pred_logits"].detach()[:, None]).abs().amax(-1)
    rows = distances.argmin(1)
    assert distances.amin(1).max() < 1e-5
    expected = (logits.gather(1, rows[..., None].expand(-1, -1, 5)) * weights).sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, parameters), rtol=1e-4, atol=1e-5)
