"""MAE with the golden weights against what the transformers library computed, in float64."""

import pytest
import torch
from golden.weights import compare, grad_projection, load_case

from vitkit.model_zoo.converters import convert_official
from vitkit.model_zoo.converters.vit import TRANSFORMERS
from vitkit.models.mae import MAE, ReconstructionLoss

FORMAT = next(form for form in TRANSFORMERS if form.name == "transformers ViTMAE")
NAMES_IN_MEMORY = (
    ("vit.encoder.layer.", "vit.layers."),
    *((f"attention.attention.{name}.", f"attention.{name[0]}_proj.") for name in ("query", "key", "value")),
    ("attention.output.dense.", "attention.o_proj."),
    ("intermediate.dense.", "mlp.fc1."),
    ("output.dense.", "mlp.fc2."),
)


@pytest.fixture(scope="module")
def case():
    return load_case("vit_mae")


def build(**options) -> MAE:
    backbone = dict(type="ViT", patch_size=8, d_model=32, depth=2, num_heads=4, image_size=48, positions="sincos")
    return MAE(backbone, decoder_d_model=16, decoder_depth=2, decoder_num_heads=2, **options)


@pytest.fixture(scope="module", params=["norm_pix", "pixels"])
def model(request, case):
    model = build(norm_pix=request.param == "norm_pix")
    state, form = convert_official(case.torch_state_dict(), model)
    assert form.name == "transformers ViTMAE"
    model.load_state_dict(state)
    return model.double()


def inputs(case):
    tensors = case.torch_inputs()
    return tensors["images"].double(), tensors["noise"].double()


def assert_golden(case, outputs):
    report = compare(case, {name: value.detach().float().numpy() for name, value in outputs.items()}, rtol=1e-5)
    assert all(line["ok"] for line in report.values()), report


def test_fixed_positions_are_those_of_the_original(case):
    model, stored = build(), case.torch_state_dict()
    assert torch.equal(model.backbone.pos_embed, stored["vit.embeddings.position_embeddings"])
    assert torch.equal(model.decoder_pos_embed, stored["decoder.decoder_pos_embed"])
    assert not {"backbone.pos_embed", "decoder_pos_embed"} & {name for name, _ in model.named_parameters()}


def test_mask_and_outputs_equal_the_original(case, model):
    images, noise = inputs(case)
    kept, removed = model.choose((6, 6), 2, noise)
    mask = torch.ones(2, 36, dtype=torch.float64).scatter(1, kept, 0.0)
    assert torch.equal(mask, torch.zeros_like(mask).scatter(1, removed, 1.0))
    tokens = model.encode(images, kept)
    # The prediction of a kept patch is of no use to MAE, but the original computes it.
    everything = torch.arange(36).expand(2, -1)
    assert_golden(case, {"mask": mask, "latent": tokens.x, "logits": model.decode(tokens, kept, everything)})


def test_loss_and_gradients_equal_the_original(case, model):
    variant = "norm_pix" if model.norm_pix else "pixels"
    images, noise = inputs(case)
    losses = ReconstructionLoss()(model(images, noise=noise), [{}, {}])
    assert losses.keys() == {"reconstruction"}
    assert losses["reconstruction"].item() == pytest.approx(case.losses[variant]["total"], rel=1e-9)
    model.zero_grad()
    losses["reconstruction"].backward()
    grads = {}
    for name, grad in FORMAT.table.write({n: p.grad for n, p in model.named_parameters()}, model).items():
        for stored, in_memory in NAMES_IN_MEMORY:
            name = name.replace(stored, in_memory)
        grads[name] = grad
    assert grads.keys() == case.grads[variant].keys()
    for name, (norm, dot) in case.grads[variant].items():
        assert grad_projection(name, grads[name].numpy()) == pytest.approx((norm, dot), abs=1e-7 * norm + 1e-12), name
