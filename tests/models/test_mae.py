"""MAE beyond its golden case: what it sees, its targets, other sizes and backbones, errors, and a run that resumes."""

import numpy as np
import pytest
import torch
from torch import Tensor

import vitkit
from vitkit.apps.explanations.reconstruction import join_patches, reconstruct
from vitkit.apps.training import api
from vitkit.engine import trainer
from vitkit.engine.build import load_initial_weights
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.models.mae import MAE, ReconstructionLoss, patch_statistics, split_patches
from vitkit.nn.vit_positions import mae_positions
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights, read_checkpoint

SMALL = dict(type="ViT", patch_size=8, d_model=16, depth=2, num_heads=2, image_size=(16, 32), positions="sincos")
PIXELS = dict(patch_size=1, image_size=4, in_channels=1, pixel_mean=[0.5], pixel_std=[0.2])
DECODER = dict(decoder_d_model=8, decoder_depth=1, decoder_num_heads=2)


def build(backbone: dict | None = None, **options) -> MAE:
    torch.manual_seed(0)
    return MAE({**SMALL, **(backbone or {})}, **{**DECODER, **options})


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def random_noise(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2))


def test_patches_hold_row_column_channel_and_can_be_joined():
    images = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    patches = split_patches(images, 2)
    assert patches.shape == (2, 6, 12)
    second_of_second_row = images[1, :, 2:4, 2:4]
    assert torch.equal(patches[1, 4].view(2, 2, 3), second_of_second_row.permute(1, 2, 0))
    assert torch.equal(join_patches(patches, (2, 3), 2), images)


def test_the_variance_of_a_patch_is_unbiased():
    patches = random_noise(2, 3, 12)
    mean, std = patch_statistics(patches)
    np.testing.assert_allclose(mean[..., 0], patches.numpy().mean(-1), rtol=1e-6)
    np.testing.assert_allclose(std[..., 0], np.sqrt(patches.numpy().var(-1, ddof=1) + 1e-6), rtol=1e-5)


def test_positions_count_columns_in_the_first_half_of_the_channels():
    table = mae_positions((2, 3), 8)
    assert table.shape == (1, 7, 8) and not table[:, 0].any()
    row, column, frequency = 1, 2, 0.01  # the second of two frequencies: 10000 ** (-1 / 2)
    expected = [np.sin(column), np.sin(column * frequency), np.cos(column), np.cos(column * frequency)]
    expected += [np.sin(row), np.sin(row * frequency), np.cos(row), np.cos(row * frequency)]
    np.testing.assert_allclose(table[0, 1 + row * 3 + column], expected, rtol=1e-6)


def test_weights_start_as_in_the_original():
    model = build(dict(d_model=64, num_heads=4), decoder_d_model=64)
    for name, parameter in model.named_parameters():
        if name.endswith(("cls_token", "mask_token")):
            assert 0.012 < parameter.std() < 0.03, name
        elif parameter.ndim == 1 and not name.endswith("patch_embed.proj.bias"):  # which keeps torch's initial values
            assert torch.equal(parameter, torch.full_like(parameter, "norm" in name and "weight" in name)), name
        elif parameter.ndim > 1:
            limit = (6 / (parameter.shape[0] + parameter[0].numel())) ** 0.5
            assert 0.95 * limit < parameter.abs().max() <= limit, name


def test_predictions_depend_only_on_the_kept_patches():
    model, images, noise = build(), random_images(2, 3, 16, 32), random_noise(2, 8)
    outputs = model(images, noise=noise)
    kept, removed = model.choose((2, 4), 2, noise)
    assert kept.shape == (2, 2) and torch.equal(outputs["removed"], removed)
    assert all(sorted((*k, *r)) == list(range(8)) for k, r in zip(kept.tolist(), removed.tolist()))

    def changed(patches: Tensor) -> Tensor:
        parts = split_patches(images, 8)
        other = parts.scatter(1, patches[:, :, None].expand(-1, -1, 192), 7)
        return model(join_patches(other, (2, 4), 8), noise=noise)["pred_patches"]

    assert torch.equal(changed(removed), outputs["pred_patches"])
    assert not torch.allclose(changed(kept), outputs["pred_patches"])


def test_targets_are_normalized_by_patch_or_only_as_the_image():
    images, noise = torch.randn(2, 3, 16, 32), random_noise(2, 8)
    by_patch = build()(images, noise=noise)["target_patches"]
    torch.testing.assert_close(by_patch.mean(-1), torch.zeros(2, 6), atol=1e-5, rtol=0)
    torch.testing.assert_close(by_patch.std(-1), torch.ones(2, 6), atol=1e-4, rtol=0)
    outputs = build(norm_pix=False)(images, noise=noise)
    expected = split_patches(images, 8).take_along_dim(outputs["removed"][:, :, None], dim=1)
    assert torch.equal(outputs["target_patches"], expected)


def test_masks_are_random_in_training_and_fixed_in_evaluation():
    model, images = build(), random_images(2, 3, 16, 32)
    assert not torch.equal(model(images)["removed"], model(images)["removed"])
    model.eval()
    state = torch.get_rng_state()
    outputs = model(images)
    assert torch.equal(outputs["removed"], model(images)["removed"])
    assert torch.equal(state, torch.get_rng_state())  # an evaluation does not change the rest of a training
    assert outputs["features"].shape == (2, 16)
    expected = model.backbone.run_blocks(model.backbone.tokens(model.prepare(images))).x[:, 0]
    assert torch.equal(outputs["features"], model.backbone.norm(expected))
    assert ReconstructionLoss()(outputs, [{}, {}])["reconstruction"] > 0


@pytest.mark.parametrize("positions", ["sincos", "all", "rotary", "axes", "none"])
@pytest.mark.parametrize("others", [dict(), dict(num_registers=2), dict(class_token=False)])
def test_kept_patches_are_encoded_as_if_all_were_there(positions, others):
    """Kept in another order, all patches are encoded as without a mask."""
    model = build(dict(positions=positions, **others)).eval()
    images = model.prepare(random_images(2, 3, 16, 32))
    order = random_noise(2, 8).argsort(dim=1)
    count = model.backbone.num_tokens
    tokens = model.encode(images, order).x
    expected = model.backbone.norm(model.backbone.run_blocks(model.backbone.tokens(images)).x)
    torch.testing.assert_close(tokens[:, :count], expected[:, :count])
    torch.testing.assert_close(tokens[:, count:], expected[:, count:].take_along_dim(order[:, :, None], dim=1))
    losses = ReconstructionLoss()(model.train()(images), [{}, {}])
    losses["reconstruction"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_images_of_another_size_have_resampled_positions():
    outputs = build()(random_images(1, 3, 24, 24))
    assert outputs["pred_patches"].shape == (1, 7, 192) and outputs["pred_patches"].isfinite().all()


def test_a_reconstruction_keeps_what_was_seen():
    model, images, noise = build().eval(), random_images(1, 3, 16, 32), random_noise(1, 8)
    whole, removed, predicted, errors = reconstruct(model, images, noise=noise)
    torch.testing.assert_close(whole, images / 255, atol=1e-5, rtol=0)
    assert removed.shape == (1, 2, 4) and removed.sum() == 6
    hidden = removed.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None].expand_as(whole)
    assert torch.equal(predicted[~hidden], whole[~hidden])
    losses = ReconstructionLoss()(model.predict(model.prepare(images), noise), [{}])
    assert errors.item() == pytest.approx(losses["reconstruction"].item())
    # A perfect prediction is the image.
    model.decode = lambda tokens, kept, removed: model.predicted
    model.predicted = torch.zeros(1, 6, 192)
    model.predicted = model.predict(model.prepare(images), noise)["target_patches"]
    torch.testing.assert_close(reconstruct(model, images, noise=noise).predicted, whole, atol=1e-4, rtol=0)


def test_bfloat16_predicts_and_the_loss_stays_in_full_precision():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        losses = ReconstructionLoss()(model(random_images(2, 3, 16, 32)), [{}, {}])
    assert losses["reconstruction"].dtype == torch.float32
    losses["reconstruction"].backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mask_ratio=1.0), r"^mask_ratio=1\.0: expected a number between 0 and 1 that keeps and removes at least"),
        (dict(mask_ratio=0), r"^mask_ratio=0: expected a number between 0 and 1"),
        (dict(mask_ratio=0.9), r"at least one of 2 x 4 patches"),
        (dict(mask_ratio=75), r"^mask_ratio=75"),
        (dict(decoder_num_heads=3), r"^decoder_d_model=8: expected a multiple of 4 and of decoder_num_heads=3"),
        (dict(decoder_depth=0), r"^decoder_depth=0: expected at least 1"),
        (dict(backbone=dict(type="ResNet", depth=18)), r"^backbone: MAE removes tokens of a ViT; got ResNet"),
        (dict(backbone=dict(type="ViTDet", d_model=16, depth=1, num_heads=2)), r"^backbone: MAE needs a ViT without w"),
        (dict(backbone={**SMALL, "num_classes": 3}), r"^backbone ViT is a classifier"),
        (dict(backbone={**SMALL, "image_size": 20}), r"^backbone.image_size: 20 x 20 pixels cannot be divided into "),
        (
            dict(backbone={**SMALL, "d_model": 18}),
            r"^backbone: positions='sincos': d_model=18 must be a multiple of 4\.$",
        ),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(ConfigError, match=message):
        MAE(**{**dict(backbone=SMALL), **DECODER, **options})


def test_images_that_are_no_whole_patches_are_an_error():
    with pytest.raises(
        DataError, match=r"^MAE: images of 16 x 30 pixels: expected multiples of the patch size, 8\. Set"
    ):
        build()(random_images(1, 3, 16, 30))


def test_a_plain_vit_takes_the_weights_of_the_backbone():
    backbone = build().backbone
    plain = BACKBONES.build({**SMALL, "positions": "all"})
    assert load_weights(plain, backbone.state_dict()).missing == []
    images = torch.randn(1, 3, 16, 32)
    assert torch.equal(plain.eval()(images)["res3"], backbone.eval()(images)["res3"])
    assert "pos_embed" in dict(plain.named_parameters())  # which fine-tuning changes


def config(**train) -> dict:
    data = dict(type="ShapesClassification", image_size=32, num_images=12)
    return dict(
        model=dict(type="MAE", backbone={**SMALL, "image_size": 32}, **DECODER),
        criterion=dict(type="ReconstructionLoss"),
        data=dict(
            train=dict(type="UnlabeledImages", source=data), val=dict(**data, split="val"), images_per_gpu=4,
            val_images_per_gpu=4, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=1e-3, betas=[0.9, 0.95], no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR"),
        evaluator=dict(type="NearestNeighbors"),
        train=dict(epochs=2, save_every_steps=1, best_metric="knn/top1", log_every=1, **train),
    )  # fmt: skip


def test_a_run_that_was_interrupted_goes_on_with_the_same_masks(tmp_path, monkeypatch):
    monkeypatch.setitem(api.FIGURES, "plot_training", lambda log_path, out_path: None)
    whole = vitkit.train(config(), run_dir=tmp_path / "whole", device="cpu")
    assert {"knn/top1", "loss"} <= whole.metrics.keys()
    save_step = trainer.save_step

    def interrupt(run, decision):
        save_step(run, decision)
        if run.progress.step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "save_step", interrupt)
        vitkit.train(config(), run_dir=tmp_path / "parts", device="cpu")
    torch.manual_seed(17)
    vitkit.train(resume=tmp_path / "parts", device="cpu")
    one, two = (read_checkpoint(tmp_path / name / "last.pth") for name in ("whole", "parts"))
    assert one["progress"]["step"] == two["progress"]["step"] == 6
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    # Others take the backbone that it wrote.
    spec = dict(type="Classifier", backbone={**SMALL, "image_size": 32, "pretrained": str(tmp_path / "parts")})
    classifier = vitkit.build_model({**spec, "num_classes": 3})
    load_initial_weights(classifier, spec, None, None)
    assert torch.equal(classifier.backbone.blocks[1].mlp.fc1.weight, one["model"]["backbone.blocks.1.mlp.fc1.weight"])
    with pytest.raises(ConfigError, match=r"^MAE predicts nothing in images: it trains a backbone for other models\."):
        vitkit.load(tmp_path / "parts")(np.zeros((32, 32, 3), np.uint8))


def test_the_masks_of_a_step_do_not_depend_on_the_number_of_processes(tmp_path):
    """A process that trains on two batches of two draws what two processes of one batch each do; see `seed_batch`."""
    from vitkit.engine.checkpointing import Progress
    from vitkit.engine.step import seed_batch

    model, images, removed = build(), random_images(2, 3, 16, 32), []
    for index in (0, 1, 0, 1):
        seed_batch(42, Progress(), index, stage=1)
        removed.append(model(images)["removed"])
    assert torch.equal(removed[0], removed[2]) and torch.equal(removed[1], removed[3])
    assert not torch.equal(removed[0], removed[1])


def test_an_encoder_without_decoder_is_another_models_checkpoint():
    with pytest.raises(CheckpointError, match="does not fit MAE"):
        load_weights(build(), build().backbone.state_dict())


@pytest.mark.parametrize(("epochs", "warmup"), [(1600, 40), (300, 40), (50, 10)])
def test_the_warm_up_of_a_short_run_is_a_part_of_it(epochs, warmup):
    config = vitkit.load_config(f"pretrain/mae:data=photos,images_per_step=64,epochs={epochs}")
    assert config["schedule"]["warmup_epochs"] == warmup
