import numpy as np
import torch
from PIL import Image

from vitkit.apps.visualization.canvas import choose_class_color, class_color
from vitkit.apps.visualization.masks import draw_masks, draw_panoptic, draw_semantic
from vitkit.apps.visualization.predictions import draw_truth, save_pairs
from vitkit.data.synthetic.shapes import ShapesSegmentation

NAMES = ["cat", "dog", "sky"]
BLACK = np.zeros((400, 500, 3), np.uint8)


def on_black(label):
    """Return the color of a class on black, with the opacity of an overlay."""
    return tuple(np.rint(np.array(choose_class_color(label, NAMES)) * 0.35).tolist())


def has_color(image, color):
    return bool((image == color).all(axis=-1).any())


def test_instances_have_colors_of_their_own():
    image, masks = np.full((320, 320, 3), 120, np.uint8), np.zeros((2, 320, 320), bool)
    masks[0, :, :150] = masks[1, :, 150:] = True
    by_class = draw_masks(image, masks, [0, 0], ["cell"])
    shaded = draw_masks(image, masks, [0, 0], ["cell"], shades=True)
    assert (by_class[40, 40] == by_class[40, 280]).all() and by_class.shape[0] > 320  # with a legend
    assert (shaded[40, 40] != shaded[40, 280]).any()


def test_masks_are_colored_with_a_legend_below():
    masks = np.zeros((1, 400, 500), bool)
    masks[0, 100:300, 50:250] = True
    drawn = draw_masks(BLACK, masks, [1], NAMES, scores=[0.9])
    assert tuple(drawn[120, 60]) == on_black(1)
    assert not drawn[:90, :].any() and not drawn[310:400].any() and not drawn[:400, 260:].any()
    assert (
        drawn.shape[0] > 400 and has_color(drawn[400:], class_color(1)) and not has_color(drawn[400:], class_color(0))
    )
    assert not BLACK.any()


def test_smallest_of_overlapping_masks_is_on_top():
    masks = torch.zeros(2, 400, 500, dtype=torch.bool)
    masks[0, 150:200, 150:450] = True
    masks[1] = True
    drawn = draw_masks(BLACK, masks, torch.tensor([0, 2]), NAMES)
    assert tuple(drawn[160, 440]) == on_black(0) and tuple(drawn[50, 50]) == on_black(2)


def test_names_stand_on_what_is_seen_of_a_mask():
    masks = np.zeros((3, 400, 500), bool)
    masks[0, 50:350, 20:480] = True
    masks[1, 100:300, 60:440] = True  # its center is that of the first
    masks[2, 100:299, 60:440] = True  # hides the second but for a line
    drawn = draw_masks(BLACK, masks, [0, 1, 2], NAMES, scores=[0.9, 0.8, 0.7])[:400]

    def tags(label):
        return (drawn == choose_class_color(label, NAMES)).all(axis=-1)[4:-4, 4:-4]

    assert tags(2)[150:250, 100:400].sum() > 500  # on top, inside
    assert not tags(0)[110:290, 70:430].any() and tags(0).sum() > 2000  # beside it, with its edges
    assert not tags(1)[110:280, 70:430].any()


def test_a_small_image_is_enlarged_with_its_masks():
    masks = np.zeros((1, 40, 50), bool)
    masks[0, 20:35, 10:30] = True
    drawn = draw_masks(np.zeros((40, 50, 3), np.uint8), masks, [0], NAMES, min_side=320)
    assert drawn.shape[1] == 400
    assert tuple(drawn[8 * 34, 8 * 28]) == on_black(0)


def test_image_without_masks_is_unchanged():
    image = np.full((400, 400, 3), 7, np.uint8)
    assert np.array_equal(draw_masks(image, np.zeros((0, 400, 400), bool), [], NAMES), image)


def test_ignored_and_void_pixels_stay_uncolored():
    labels = np.full((400, 500), 255, np.uint8)
    labels[:, :250] = 1
    drawn = draw_semantic(BLACK, labels, NAMES)
    assert tuple(drawn[50, 50]) == on_black(1) and not drawn[:400, 260:].any()
    ids = torch.zeros(400, 500, dtype=torch.int32)
    ids[:, :250] = 70000
    drawn = draw_panoptic(BLACK, ids, [dict(id=70000, label=2)], NAMES)
    assert tuple(drawn[50, 50]) == on_black(2) and not drawn[:400, 260:].any()


def test_segments_of_one_class_have_different_shades():
    ids = torch.zeros(400, 500, dtype=torch.int32)
    for k in range(8):
        ids[:, 50 * k : 50 * (k + 1)] = k + 1
    segments = [dict(id=k + 1, label=0 if k < 7 else 1) for k in range(8)]
    drawn = draw_panoptic(BLACK, ids, segments, NAMES)
    colors = [tuple(drawn[350, 50 * k + 10].tolist()) for k in range(8)]
    assert len(set(colors)) == 8 and colors[0] == on_black(0) and colors[7] == on_black(1)
    # The semantic map of the same classes has one color for all seven.
    semantic = draw_semantic(BLACK, torch.where(ids == 0, 255, torch.where(ids == 8, 1, 0)), NAMES)
    assert {tuple(semantic[350, 50 * k + 10].tolist()) for k in range(7)} == {on_black(0)}


def test_shades_do_not_depend_on_the_order_of_segments():
    ids = torch.zeros(400, 500, dtype=torch.int32)
    ids[:, :200], ids[100:300, 200:] = 1, 2
    segments = [dict(id=1, label=0), dict(id=2, label=0)]
    assert np.array_equal(draw_panoptic(BLACK, ids, segments, NAMES), draw_panoptic(BLACK, ids, segments[::-1], NAMES))
    target = dict(labels=torch.tensor([0, 0]), masks=torch.stack([ids == 2, ids == 1]))
    assert np.array_equal(draw_truth(BLACK, target, NAMES, "panoptic"), draw_panoptic(BLACK, ids, segments, NAMES))


def test_an_opaque_semantic_map_has_the_colors_of_the_classes():
    ids = torch.ones(400, 500, dtype=torch.int64)
    noise = np.random.default_rng(0).integers(0, 255, (400, 500, 3), dtype=np.uint8)
    drawn = draw_semantic(noise, ids, NAMES, opacity=1.0)
    assert tuple(drawn[50, 50]) == class_color(1) and tuple(drawn[350, 450]) == class_color(1)


def test_sheets_show_predictions_beside_the_truth(tmp_path):
    panoptic = ShapesSegmentation(3, image_size=64, min_objects=0, max_objects=0)
    target, image = panoptic[0]["target"], panoptic.load_image(0)
    square = torch.zeros(2, 64, 64, dtype=torch.bool)
    square[0, 20:60, 10:40] = True
    square[1, 2:18, 2:60] = True
    predictions = {
        "masks": dict(masks=square, labels=torch.tensor([0, 1]), scores=torch.tensor([0.9, 0.2])),
        "semantic": dict(semantic=torch.where(square[0], 0, 9)),
        "panoptic": dict(panoptic=square[0].int() * 4, segments_info=[dict(id=4, label=0, score=0.9)]),
    }
    for field, prediction in predictions.items():
        path = tmp_path / "new" / f"{field}.png"
        save_pairs([(image, prediction, target)] * 3, panoptic.classes, field, path)
        figure = np.asarray(Image.open(path))
        left, right = np.array_split(figure[:, : figure.shape[1] // 2], 2, axis=1)
        assert has_color(left, class_color(0)) and not has_color(left, class_color(1))
        assert not has_color(right, class_color(0)) and has_color(right, class_color(int(target["labels"][0])))


def test_ground_truth_may_have_another_size_than_the_image(tmp_path):
    dataset = ShapesSegmentation(1, image_size=64, transforms=dict(type="EvalResize", short_side=96, max_size=96))
    prediction = dict(semantic=torch.zeros(64, 64, dtype=torch.int64))
    rows = [(dataset.load_image(0), prediction, dataset[0]["target"])]
    save_pairs(rows, dataset.classes, "semantic", tmp_path / "a.png")
    assert (tmp_path / "a.png").is_file()


def test_classes_have_their_conventional_colors():
    names = ["person", "Sky", "sky-other-merged", "tree", "zebra"]
    sky, tree = choose_class_color(1, names), choose_class_color(3, names)
    assert sky[2] > sky[1] > sky[0] and tree[1] > max(tree[0], tree[2])
    # A second sky gets another color than the first, and names without an expected color get that of their number.
    assert choose_class_color(2, names) == class_color(2) and choose_class_color(4, names) == class_color(4)
    assert len({choose_class_color(label, names) for label in range(5)}) == 5


def test_names_in_the_legend_are_never_truncated():
    masks = np.ones((1, 400, 500), bool)
    name = "a very long name of a class that is wider than its small figure can be, and then some more"
    drawn = draw_masks(BLACK, masks, [0], [name])
    assert drawn.shape[1] > 500 and (drawn[:, -4:] == 255).all()
