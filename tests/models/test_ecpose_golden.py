"""ECPose-S with the golden weights against another implementation of the original, in float64: outputs of each layer,
detections, loss terms, matches and gradients, with positions kept or not, and both kinds of noise in denoising.

`golden/ecpose_s` is from libreyolo 1.6.0, changed where it differs from the original, see `record_ecpose.py`.
"""

import copy

import pytest
import torch
from golden.weights import compare, grad_projection, load_case, rng_for

from vitkit.configs.ecpose import VARIANTS, config, ecpose_model
from vitkit.engine.build import build_model
from vitkit.losses.dfine import union_of_matches
from vitkit.model_zoo.converters import convert_official
from vitkit.model_zoo.converters.ecpose import OFFICIAL
from vitkit.registry import CRITERIA
from vitkit.training_queries.keypoint_denoising import KeypointNoise

PUBLISHED = dict(s=9_989_871, m=19_981_532, l=34_566_764, x=51_542_636)
"""Parameters of the original's models in training."""
UNTRAINED = 2
"""The original's settings `up` and `reg_scale` are parameters."""
SETTINGS = (".up", "reg_scale", "anchors", "valid_mask", "periods", "dim_t")
FIELDS = ("pred_logits", "pred_keypoints")
TERMS = {"labels": "loss_vfl", "keypoint_l1": "loss_keypoints", "oks": "loss_oks"}
SUFFIXES = {"": "", "aux0_": "_pre", "aux1_": "_aux_0", "aux2_": "_aux_1", "enc_": "_enc_0"} | {
    "dn_": "_dn_2", "dn_aux0_": "_dn_pre", "dn_aux1_": "_dn_0", "dn_aux2_": "_dn_1"
}  # fmt: skip


@pytest.fixture(scope="module")
def case():
    return load_case("ecpose_s")


@pytest.fixture(scope="module")
def models(case):
    """Return the model with the original's form of positions and noise, and that with the paper's."""
    spec = ecpose_model("s")
    spec |= dict(num_classes=2, backbone=spec["backbone"] | dict(pretrained=False))
    models = {}
    for published in (True, False):
        changed = copy.deepcopy(spec)
        changed["head"]["keeps_positions"] = changed["training_queries"][0]["published_noise"] = published
        model = build_model(changed)
        state, converter = convert_official(case.torch_state_dict(), model)
        assert converter.name == "Intellindust-AI-Lab/EdgeCrafter, poses"
        model.load_state_dict(state)
        models[published] = model.double()
    return models


def pixels(case):
    return case.torch_inputs()["images"].double()


def targets_of(case, variant):
    side, targets = case.meta["settings"]["side"], []
    for target in case.targets[variant]:
        target = {name: torch.from_numpy(value) for name, value in target.items()}
        target["boxes_cxcywh"] = target.pop("boxes")
        targets.append(target | dict(image_size=(side, side)))
    return targets


def noise_of(variant, count):
    rng = rng_for(f"draws:ecpose_s:{variant}")
    draws = rng.random(count), rng.integers(0, 80, count), rng.random((count, 18, 2)), rng.random((count, 18))
    return KeypointNoise(*map(torch.from_numpy, draws))


def assert_golden(case, outputs, atol):
    """Compare outputs; references and distributions are in float32 here."""
    for name, value in outputs.items():
        value = value.detach().flatten(2) if name.endswith("pred_keypoints") else value.detach()
        (line,) = compare(case, {name: value.float().numpy()}).values()
        assert line["max_abs"] < atol, (name, line)


def test_the_official_names_are_written_back(case, models):
    written, stored = OFFICIAL[0].table.write(models[True].state_dict(), models[True]), case.torch_state_dict()
    assert {name for name in written if not name.endswith(SETTINGS)} == stored.keys()
    assert all(torch.equal(written[name].float(), value.float()) for name, value in stored.items())


def test_outputs_and_detections_equal_the_original(case, models):
    model = models[True].eval()
    with torch.no_grad():
        outputs = model(pixels(case))
        results = model.postprocess(outputs, case.meta["post"]["target_sizes"])
    assert_golden(case, {name: outputs[name] for name in FIELDS}, 5e-4)
    for name in ("scores", "labels"):
        (line,) = compare(case, {f"post/{name}": torch.stack([r[name] for r in results]).numpy()}).values()
        assert line["max_abs"] < 1e-4, name
    points = torch.stack([result["keypoints"] for result in results])
    (line,) = compare(case, {"post/keypoints": points[..., :2].numpy()}).values()
    assert line["max_abs"] < 1e-2 and (points[..., 2] == 1).all()
    # Boxes are around the points, inside the image.
    for result, (height, width) in zip(results, case.meta["post"]["target_sizes"]):
        limits = torch.tensor([width, height])
        low, high = (x.clamp(min=0).minimum(limits) for x in torch.aminmax(result["keypoints"][..., :2], dim=1))
        torch.testing.assert_close(result["boxes_xyxy"], torch.cat((low, high), dim=1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("variant", ["objects", "published", "one_empty", "none"])
def test_training_equals_the_original(case, models, variant, monkeypatch):
    model, targets = models[variant != "objects"].train(), targets_of(case, variant)
    denoising = model.training_queries.denoising
    monkeypatch.setattr(denoising, "draw", lambda count, device: noise_of(variant, count))
    if variant != "none":
        (noised,) = denoising(model.head, targets, None)
        (line,) = compare(case, {f"{variant}/noised": noised["queries"].references.numpy()}).values()
        assert line["max_abs"] < 1e-5, line
    outputs = model(pixels(case), None, targets)
    encoder, noised = outputs["training_outputs"]
    named = {f"{variant}/enc/{field}": encoder[field] for field in FIELDS}
    for prefix, part in {"": outputs, "dn": noised}.items():
        names = ("dn_pre", "dn0", "dn1", "dn2") if prefix else ("pre", "aux0", "aux1", "last")
        for name, layer in zip(names, [*part["aux_outputs"], part], strict=True):
            named |= {f"{variant}/{name}/{field}": layer[field] for field in FIELDS}
    if variant != "none":
        assert named.keys() | {f"{variant}/noised"} == {
            name for name in case.expected if name.startswith(f"{variant}/")
        }
        assert_golden(case, named, 5e-4)

    criterion = CRITERIA.build(config("s")["criterion"])
    losses, expected = criterion(outputs, targets), case.losses[variant]["terms"]
    assert losses.keys() == {prefix + term for prefix in SUFFIXES for term in TERMS}
    for prefix, suffix in SUFFIXES.items():
        for term, theirs in TERMS.items():
            # Without persons there is no denoising there.
            value = expected.get(theirs + suffix, 0.0 if variant == "none" else None)
            assert losses[prefix + term].item() == pytest.approx(value, rel=1e-5, abs=1e-6), prefix + term
    sigmas = model.head.keypoint_sigmas
    check_matches(case, variant, criterion.match(outputs, targets, keypoint_sigmas=sigmas)[:2])

    model.zero_grad()
    sum(losses.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    written = {k: x for k, x in OFFICIAL[0].table.write(gradients, model).items() if not k.endswith(SETTINGS)}
    for name, (norm, projection) in case.grads[variant].items():
        got_norm, got_projection = grad_projection(name, written.pop(name).numpy())
        # Rounding moves some of half a million sampled points to another pixel, and their gradients with them.
        assert got_norm == pytest.approx(norm, rel=5e-3, abs=1e-6), name
        assert got_projection == pytest.approx(projection, abs=5e-3 * norm + 1e-6), name
    assert not any(gradient.any() for gradient in written.values())


def check_matches(case, variant, sets):
    """Compare the matches of each layer, and their union, with the original's."""
    main, encoder = sets
    layers = dict(zip(("last", "pre", "aux0", "aux1"), main.matches, strict=True)) | {"enc": encoder.matches[0]}
    theirs = case.losses[variant]["indices"]
    for name, images in layers.items():
        for (query, target), (their_query, their_target) in zip(images, theirs[name], strict=True):
            assert query.tolist() == their_query.tolist() and target.tolist() == their_target.tolist(), name
    union = union_of_matches([*main.matches, *encoder.matches], 60, main.counts)
    for (query, target), (their_query, their_target) in zip(union, theirs["union"]):
        assert dict(zip(query.tolist(), target.tolist())) == dict(zip(their_query.tolist(), their_target.tolist()))


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_have_the_originals_parameters(size):
    with torch.device("meta"):
        model = build_model(ecpose_model(size) | dict(num_classes=2))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PUBLISHED[size] - UNTRAINED
    assert f"; {count:,} parameters" in VARIANTS[f"ecpose_{size}_coco"][1]
