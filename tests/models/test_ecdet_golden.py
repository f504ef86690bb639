"""ECDet-S and ECSeg-S with the golden weights against the original, in float64: maps, outputs of each layer,
detections, loss terms, matches and gradients, with the original's noise of denoising, and points of masks.

`golden/ecdet_s` and `golden/ecseg_s` are from Intellindust-AI-Lab/EdgeCrafter at 706d037. Rectangles have the positions
of the map.
"""

import numpy as np
import pytest
import torch
from golden.weights import compare, grad_projection, load_case, rng_for
from helpers.dfine_losses import PREFIXES, TERMS, golden_targets

from vitkit.config import load_config
from vitkit.configs import ecdet, ecseg
from vitkit.engine.build import build_model
from vitkit.losses import dfine
from vitkit.model_zoo.converters import convert_official
from vitkit.model_zoo.converters.ecdet import OFFICIAL
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.ops.masks import mask_logits
from vitkit.registry import CRITERIA
from vitkit.training_queries.box_denoising import Noise, list_copied_rows

CONFIGS = {"ecdet_s": ecdet.config("s"), "ecseg_s": ecseg.config("s")}
PUBLISHED = {
    **{f"ecdet_{size}_coco": n for size, n in dict(s=9_884_102, m=19_431_502, l=32_966_110, x=49_941_982).items()},
    **{f"ecseg_{size}_coco": n for size, n in dict(s=10_411_911, m=20_364_623, l=33_899_231, x=50_875_103).items()},
}
"""Parameters of the original's models in training."""
UNTRAINED = 2
"""The original's settings `up` and `reg_scale` are parameters."""
LAYERS_WITH_MASKS = (*("last", "pre", "aux0", "aux1", "aux2"), *("dn_last", "dn_pre", "dn_aux0", "dn_aux1", "dn_aux2"))
"""In the order of the losses."""
SETTINGS = (".up", "reg_scale", "num_points_scale", "anchors", "valid_mask", "periods")
FIELDS = ("pred_logits", "pred_boxes", "pred_corners", "pred_masks")
MASK_TERMS = {"mask": "loss_mask_ce", "dice": "loss_mask_dice"}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    return load_case(request.param)


@pytest.fixture(scope="module")
def model(case):
    spec = CONFIGS[case.name]["model"]
    model = build_model(spec | dict(num_classes=80, backbone=spec["backbone"] | dict(pretrained=False)))
    state, converter = convert_official(case.torch_state_dict(), model)
    assert converter.name == "Intellindust-AI-Lab/EdgeCrafter"
    model.load_state_dict(state)
    return model.double()


def normalized(case, name):
    mean, std = (torch.tensor(values).double()[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (case.torch_inputs()[name].double() / 255 - mean) / std


def with_masks(layer):
    """Return a layer's outputs with its masks, if it predicts them."""
    masks = {"pred_masks": mask_logits(layer["mask_embed"], layer["mask_features"])} if "mask_embed" in layer else {}
    return {name: value for name, value in {**layer, **masks}.items() if name in FIELDS}


def assert_golden(case, outputs, atol=None):
    """Compare outputs; references are in float32 here, whose rounding the decoder amplifies to `atol`."""
    for name, value in outputs.items():
        (line,) = compare(case, {name: value.detach().float().numpy()}).values()
        assert line["ok"] if atol is None else line["max_abs"] < atol, (name, line)


def test_the_official_names_are_written_back(case, model):
    written, stored = OFFICIAL[0].table.write(model.state_dict(), model), case.torch_state_dict()
    assert written.keys() == stored.keys()
    same = [torch.equal(value.float(), stored[key].float()) for key, value in written.items() if "anchors" not in key]
    assert sum(same) == len(stored) - 2  # the mask of anchors is that of 640 x 640, too
    anchors = written["decoder.anchors"].nan_to_num(posinf=99.0)  # as the file has infinity
    assert_golden(case, {"anchors640": anchors, "valid640": written["decoder.valid_mask"]})


def test_maps_outputs_and_detections_equal_the_original(case, model):
    maps = {}

    def store(part):
        return lambda module, args, output: maps.update({f"{part}/{i}": x for i, x in enumerate(output.values())})

    hooks = [
        model.backbone.register_forward_hook(store("backbone")),
        model.neck.register_forward_hook(store("encoder")),
    ]
    with torch.no_grad():
        outputs = model.eval()(normalized(case, "square"))
    for hook in hooks:
        hook.remove()
    assert maps.keys() == {f"{part}/{i}" for part in ("backbone", "encoder") for i in range(3)}
    assert_golden(case, maps)
    predicted = with_masks(outputs)
    assert_golden(case, {f"eval/{name}": predicted[name] for name in FIELDS[:2]}, atol=1e-3)
    results = model.postprocess(outputs, case.meta["post"]["target_sizes"])
    scores, labels, boxes = (torch.stack([one[k] for one in results]) for k in ("scores", "labels", "boxes_xyxy"))
    assert_golden(case, {"eval/post_scores": scores}, atol=1e-4)
    # Those whose score is almost that of a neighbor may have changed places with it.
    gaps = torch.from_numpy(np.diff(case.expected["eval/post_scores"].values, prepend=2.0, append=-1.0)).abs()
    apart = torch.minimum(gaps[:, 1:], gaps[:, :-1]) > 1e-4
    assert apart.float().mean() > 0.7
    expected = [torch.from_numpy(case.expected[f"eval/post_{name}"].values)[apart] for name in ("labels", "boxes")]
    assert torch.equal(labels[apart], expected[0])
    torch.testing.assert_close(boxes[apart].float(), expected[1], atol=0.05, rtol=0)
    if "pred_masks" in predicted:
        check_masks(case, model, outputs, results, apart)


def check_masks(case, model, outputs, results, apart):
    """Compare the masks with one block and with all of them, and those of detections, of which each ninth is stored."""
    assert_golden(case, {"eval/pred_masks": with_masks(outputs)["pred_masks"]}, atol=1e-2)
    model.head.mask_head.one_block = False
    with torch.no_grad():
        all_blocks = model(normalized(case, "square"))
    model.head.mask_head.one_block = True
    assert_golden(case, {"all_blocks/pred_masks": with_masks(all_blocks)["pred_masks"]}, atol=1e-2)
    with np.load(f"tests/golden/{case.name}.npz") as data:
        for i, (result, size) in enumerate(zip(results, case.meta["post"]["target_sizes"], strict=True)):
            num_pixels = size[0] * size[1]
            bits = np.unpackbits(data[f"post/masks/{i}"])[: len(result["masks"][::9]) * num_pixels]
            stored = torch.from_numpy(bits).bool().view(-1, *size)
            areas = torch.from_numpy(data[f"post/mask_areas/{i}"])
            certain = apart[i]
            wrong = (result["masks"][::9] != stored)[certain[::9]].float().mean((1, 2))
            assert len(wrong) > 20 and wrong.max() < 1e-3, wrong
            difference = (result["masks"].flatten(1).sum(1) - areas)[certain].abs()
            assert difference.max() <= 1e-3 * num_pixels, difference


@pytest.mark.parametrize("name", ["portrait", "cropped"])
def test_rectangles_equal_the_original(case, model, name):
    height, width = case.meta["settings"]["cropped"]
    images = normalized(case, "portrait" if name == "portrait" else "images")[-1:]
    images = images[..., :-height, :-width] if name == "cropped" else images
    with torch.no_grad():
        outputs = with_masks(model.eval()(images))
    assert_golden(case, {f"{name}/{field}": outputs[field] for field in FIELDS[:2]}, atol=1e-3)
    if "pred_masks" in outputs:
        assert_golden(case, {f"{name}/pred_masks": outputs["pred_masks"]}, atol=1e-2)


def noise_of(case, variant, counts):
    """Return the original's draws for the rows that have a target."""
    settings = case.meta["denoising"][variant]
    rows = tuple(list_copied_rows(counts, 2 * settings["groups"]))
    rng = [rng_for(f"draws:{case.name}:{variant}:{i}") for i in range(settings["draws"])]
    shape = (len(counts), settings["rows"])
    chance, labels = rng[0].random(shape), rng[1].integers(0, 80, shape)
    signs, shares = rng[2].integers(0, 2, (*shape, 4)) * 2.0 - 1, rng[3].random((*shape, 4))
    return Noise(*(torch.from_numpy(part)[rows] for part in (chance, labels, signs, shares)))


def named_outputs(outputs, variant):
    prefixes = {"dn": "dn_"}
    sets = {"": outputs} | {prefixes[s["name"]]: s for s in outputs["training_outputs"] if s["name"] in prefixes}
    named = {f"{variant}/last/ref_points": outputs["initial_boxes"]}
    for prefix, part in sets.items():
        for name, layer in zip(("pre", "aux0", "aux1", "aux2", "last"), [*part["aux_outputs"], part], strict=True):
            # What is predicted before the first layer's refinement has the last layer's masks.
            fields = with_masks(layer).items()
            named |= {f"{variant}/{prefix}{name}/{k}": x for k, x in fields if (name, k) != ("pre", "pred_masks")}
    encoder = outputs["training_outputs"][0]
    return named | {f"{variant}/enc/{field}": encoder[field] for field in FIELDS[:2]}


@pytest.mark.parametrize("variant", ["objects", "one_empty", "none"])
def test_training_equals_the_original(case, model, variant, monkeypatch):
    targets, denoising = golden_targets(case, variant), model.training_queries.denoising
    if variant != "none":
        noise = noise_of(case, variant, [len(target["labels"]) for target in targets])
        monkeypatch.setattr(denoising, "draw", lambda count, device: noise)
        (noised,) = denoising(model.head, targets, None)
        with np.load(f"tests/golden/{case.name}.npz") as data:
            boxes, labels = (torch.from_numpy(data[f"in/{variant}/dn_{key}"]) for key in ("boxes_unact", "labels"))
        torch.testing.assert_close(noised["queries"].references, boxes.sigmoid(), atol=2e-7, rtol=0)
        content = denoising.label_embed.weight[labels.long()] * (labels < 80)[..., None]
        assert torch.equal(noised["queries"].content, content)
    outputs = model.train()(normalized(case, "images"), None, targets)
    named = named_outputs(outputs, variant)
    golden = {name for name in case.expected if name.startswith(f"{variant}/")}
    assert golden == {name for name in named if variant != "none" or "/dn_" not in name}
    assert_golden(case, {name: named[name] for name in golden}, atol=1e-4)

    criterion = CRITERIA.build(CONFIGS[case.name]["criterion"])
    take_points_of(case, variant, criterion)
    monkeypatch.setattr(dfine, "union_of_matches", union_as_in(case, variant))
    losses, expected = criterion(outputs, targets), dict(case.losses[variant]["terms"])
    assert expected.pop("loss_ddf_dn_3", 0) == 0  # the last layer of denoising is compared with itself there
    terms = TERMS | MASK_TERMS
    names = {prefix + ours: terms[ours].format("mal") + suffix for prefix, suffix in PREFIXES.items() for ours in terms}
    assert {names[name] for name in losses} == expected.keys()
    for name, value in losses.items():
        assert value.item() == pytest.approx(expected[names[name]], rel=1e-5, abs=1e-6), name
    check_matches(case, variant, criterion.match(outputs, targets, **criterion.matching_inputs(outputs))[:2])

    model.zero_grad()
    sum(losses.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    written = {k: x for k, x in OFFICIAL[0].table.write(gradients, model).items() if not k.endswith(SETTINGS)}
    for name, (norm, projection) in case.grads[variant].items():
        # Without targets, parts without a loss have a gradient of zero there, or none here.
        got_norm, got_projection = grad_projection(name, written.pop(name).numpy())
        assert got_norm == pytest.approx(norm, rel=1e-4, abs=1e-7), name
        assert got_projection == pytest.approx(projection, abs=1e-4 * norm + 1e-7), name
    assert not any(gradient.any() for gradient in written.values())


def take_points_of(case, variant, criterion):
    """Let a criterion compare masks at the original's points: one draw for all masks of a layer, or all matchings."""
    if "points" not in case.meta:
        return
    order = [case.meta["points"].index(name) for name in LAYERS_WITH_MASKS]
    purposes = {"candidates": iter(order), "uniform": iter(order)}

    def draw(purpose, num_masks, count, device):
        rng = rng_for(f"points:{case.name}:{variant}:loss:{next(purposes[purpose])}:{purpose}:{count}")
        return torch.from_numpy(rng.random((1, count, 2), dtype=np.float32)).expand(num_masks, -1, -1)

    def draw_shared(count, device):
        rng = rng_for(f"points:{case.name}:{variant}:match:{count}")
        return torch.from_numpy(rng.random((1, count, 2), dtype=np.float32))

    criterion.draw_points, criterion.matcher.draw_points = draw, draw_shared


def union_as_in(case, variant):
    """Return `union_of_matches` with the original's choice between targets with equally many votes, which is any."""
    union_of_matches = dfine.union_of_matches

    def union(layers, num_queries, counts):
        chosen = []
        expected = case.losses[variant]["indices"]["union"]
        for image, (ours, theirs) in enumerate(zip(union_of_matches(layers, num_queries, counts), expected)):
            votes = torch.zeros(num_queries, max(counts[image], 1))
            for layer in layers:
                votes[layer[image]] += 1
            query, target = map(torch.as_tensor, theirs)
            assert torch.equal(query, ours[0])
            assert torch.equal(votes[query, target.long()], votes[query].amax(1))
            chosen.append((query, target.long()))
        return chosen

    return union


def check_matches(case, variant, sets):
    """Compare the matches of each layer, and their union, with the original's."""
    main, encoder = sets
    names = dict(zip(("last", "pre", "aux0", "aux1", "aux2"), main.matches, strict=True)) | {"enc": encoder.matches[0]}
    counts = [len(target["labels"]) for target in case.targets[variant]]
    names["union"] = dfine.union_of_matches([*main.matches, *encoder.matches], 300, counts)
    assert names.keys() == case.losses[variant]["indices"].keys()
    for name, images in names.items():
        for (query, target), (their_query, their_target) in zip(images, case.losses[variant]["indices"][name]):
            assert query.tolist() == their_query.tolist() and target.tolist() == their_target.tolist(), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_have_the_originals_parameters(name):
    with torch.device("meta"):
        model = build_model(load_config(name)["model"] | dict(num_classes=80))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PUBLISHED[name] - UNTRAINED
    assert f"; {count:,} parameters" in (ecdet.VARIANTS | ecseg.VARIANTS)[name][1]
