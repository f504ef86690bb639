"""What changes between epochs and batches: transforms, the squares of a batch, mixup; also in workers and resumed."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from torch.nn import functional

from vitkit import train
from vitkit.config import check_config
from vitkit.config.load import load_config
from vitkit.data.loading.batch_augmentation import BatchAugmentation, Mixup, Squares, mix, squash
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.by_epoch import TransformsByEpoch
from vitkit.engine.hooks import Hook
from vitkit.errors import ConfigError
from vitkit.structures import Sample

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart/detr.py"


def resized(size):
    return dict(type="ComposedTransforms", transforms=[dict(type="Resize", height=size, width=size)])


FLIP = dict(type="ComposedTransforms", transforms=[dict(type="HorizontalFlip")])
MOSAIC = dict(type="GridMosaic", transforms=FLIP, otherwise=FLIP, tile=24)
STAGES = dict(type="TransformsByEpoch", transforms=[resized(32), MOSAIC, resized(40)], until_epochs=[1, 3])
WORLD = dict(type="ShapesDetection", num_images=12, image_size=48, masks=True)
SQUARES = dict(sizes=[32, 48, 48, 56], until_epoch=3, final_size=40)
MIXUP = dict(probability=0.5, share=[0.45, 0.55], from_epoch=1, until_epoch=3)


def loader_of(*, seed=0, **changed):
    settings = dict(images_per_gpu=3, num_workers=0, aspect_ratio_grouping=False)
    data = DataSettings(**{**settings, **changed})
    return data.train_loader(build_dataset(dict(WORLD, transforms=STAGES)), seed)


def epochs_of(loader, epochs=4, first=(0, 0)):
    batches = []
    for epoch in range(first[0], epochs):
        loader.set_position(epoch, first[1] if epoch == first[0] else 0)
        batches.append(list(loader))
    return batches


def assert_equal(batches, others):
    assert len(batches) == len(others)
    for a, b in zip(batches, others):
        assert torch.equal(a.inputs["images"], b.inputs["images"])
        for one, other in zip(a.targets, b.targets):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name], name


def test_transforms_follow_the_epoch_and_start_with_the_first():
    dataset = build_dataset(dict(WORLD, transforms=STAGES))
    assert dataset[0, 0]["image"].shape[1:] == (32, 32)
    sizes = []
    for epoch in (0, 1, 2, 3, 9, 0):
        dataset.set_epoch(epoch)
        sizes.append({tuple(dataset[index, 7]["image"].shape[1:]) for index in range(6)})
    assert sizes[0] == sizes[5] == {(32, 32)} and sizes[1] == sizes[2] == {(48, 48)}
    assert sizes[3] == sizes[4] == {(40, 40)}


@pytest.mark.parametrize("options", [{}, dict(squares=SQUARES, mixup=MIXUP)])
def test_workers_that_stay_load_every_epoch_like_the_training_process(options):
    alone, helped = loader_of(**options), loader_of(num_workers=2, **options)
    for ours, theirs in zip(epochs_of(alone), epochs_of(helped)):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("first", [(0, 2), (1, 0), (2, 3), (3, 1)])
def test_resumed_epochs_equal_those_of_an_uninterrupted_run(first):
    options = dict(squares=SQUARES, mixup=MIXUP)
    whole = epochs_of(loader_of(**options))
    resumed = epochs_of(loader_of(num_workers=1, **options), first=first)
    assert_equal([b for epoch in resumed for b in epoch], [b for epoch in whole[first[0] :] for b in epoch][first[1] :])


def test_batches_are_squares_of_the_drawn_sizes_without_padding():
    loader = loader_of(squares=SQUARES)
    sizes = []
    for epoch, batches in enumerate(epochs_of(loader, epochs=40)):
        for batch in batches:
            height, width = batch.inputs["images"].shape[-2:]
            assert height == width and not batch.inputs["padding_mask"].any()
            assert all(target["image_size"] == (height, width) for target in batch.targets)
            assert all(target["masks"].shape[1:] == (height, width) for target in batch.targets)
            assert epoch < 3 or height == 40
            sizes.append(height)
    assert set(sizes[:12]) == {32, 48, 56}


def test_sizes_are_drawn_as_often_as_they_are_listed():
    squares = Squares(sizes=[32, 48, 48, 56])
    drawn = [squares.draw(0, np.random.default_rng([5, 0, number])) for number in range(2000)]
    counts = [drawn.count(size) for size in (32, 48, 56)]
    assert all(abs(count - expected) < 100 for count, expected in zip(counts, (500, 1000, 500)))  # deviation 19 to 22


def test_ranks_have_the_same_size_and_mix_different_batches():
    augment = [BatchAugmentation(SQUARES, MIXUP, seed=3, rank=rank) for rank in (0, 1)]
    dataset = build_dataset(dict(WORLD))
    batch = [dataset[index, 0] for index in range(3)]
    mixed = []
    for number in range(40):
        results = [each(batch, 1, number) for each in augment]
        shapes = {tuple(sample["image"].shape) for result in results for sample in result}
        assert len(shapes) == 1
        mixed.append([len(result[0]["target"]["labels"]) > len(batch[0]["target"]["labels"]) for result in results])
    assert {tuple(row) for row in mixed} == {(True, True), (True, False), (False, True), (False, False)}


def test_a_squashed_sample_equals_torch_interpolation():
    draw = np.random.default_rng(0)
    image = torch.from_numpy(draw.integers(0, 256, (3, 20, 30), np.uint8))
    masks = torch.from_numpy(draw.random((4, 20, 30)) < 0.5)
    masks[2] = False
    masks[2, 6, 6] = True  # vanishes
    boxes = torch.rand(4, 4)
    target = {"labels": torch.arange(4), "boxes_cxcywh": boxes, "masks": masks, "image_size": (20, 30), "image_id": 9}
    large, small = squash(Sample(image=image, target=target), 40), squash(Sample(image=image, target=target), 10)
    expected = functional.interpolate(image[None].float(), size=(40, 40), mode="bilinear", antialias=True)[0]
    assert (large["image"].float() - expected).abs().max() <= 2
    expected = functional.interpolate(masks[None].float(), size=(40, 40), mode="nearest-exact")[0].bool()
    assert torch.equal(large["target"]["masks"], expected) and large["target"]["labels"].tolist() == [0, 1, 2, 3]
    # Shrinking averages: each pixel is the mean of 2 x 3.
    expected = functional.avg_pool2d(image[None].float(), (2, 3))[0]
    assert (small["image"].float() - expected).abs().max() <= 1
    kept = small["target"]["labels"].tolist()
    assert kept == [0, 1, 3] and torch.equal(small["target"]["boxes_cxcywh"], boxes[kept])
    assert small["target"]["image_size"] == (10, 10) and target["image_size"] == (20, 30)
    same = Sample(image=image[:, :20, :20], target={"labels": torch.arange(1)})
    assert squash(same, 20) is same


def flat(value, labels):
    masks = torch.zeros(len(labels), 4, 4, dtype=torch.bool)
    target = {
        "labels": torch.tensor(labels),
        "boxes_cxcywh": torch.rand(len(labels), 4),
        "masks": masks,
        "image_id": value,
    }
    return Sample(image=torch.full((3, 4, 4), value, dtype=torch.uint8), target=target)


def test_mixup_averages_neighbors_with_the_objects_of_both():
    samples = [flat(0, [1]), flat(100, [2, 3]), flat(200, [])]
    augment = BatchAugmentation(dict(sizes=[4]), dict(probability=1.0, share=[0.25, 0.25]))
    mixed = augment(samples, 0, 0)
    assert [int(sample["image"].unique()) for sample in mixed] == [150, 25, 125]
    assert [sample["target"]["labels"].tolist() for sample in mixed] == [[1], [2, 3, 1], [2, 3]]
    assert [len(sample["target"]["masks"]) for sample in mixed] == [1, 3, 2]
    boxes = torch.cat([samples[1]["target"]["boxes_cxcywh"], samples[0]["target"]["boxes_cxcywh"]])
    assert torch.equal(mixed[1]["target"]["boxes_cxcywh"], boxes) and mixed[1]["target"]["image_id"] == 100
    assert len(samples[1]["target"]["labels"]) == 2  # the arguments are left unchanged
    assert augment(samples[:1], 0, 0)[0]["target"]["labels"].tolist() == [1]  # alone
    with pytest.raises(ConfigError, match=r"data\.mixup: mixes images with boxes, and these have none"):
        mix(Sample(image=samples[0]["image"], target={"label": 1}), samples[1], 0.5)


def test_share_and_probability_of_mixup_are_those_of_the_arguments():
    mixup = Mixup(probability=0.25, share=(0.45, 0.55), from_epoch=2, until_epoch=4)
    drawn = [mixup.draw(2, np.random.default_rng([1, number])) for number in range(2000)]
    shares = [share for share in drawn if share is not None]
    assert abs(len(shares) - 500) < 100  # with a deviation of 19
    assert 0.45 <= min(shares) < 0.455 and 0.545 < max(shares) <= 0.55
    always = Mixup(probability=1.0, from_epoch=2, until_epoch=4)
    assert [always.draw(epoch, np.random.default_rng(0)) is None for epoch in range(6)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(transforms=[FLIP, FLIP], until_epochs=[]), r"until_epochs is \[\] for 2 transforms; expected the ends"),
        (dict(transforms=[FLIP, FLIP, FLIP], until_epochs=[3, 3]), "above 0 and ascending"),
        (dict(transforms=[FLIP, FLIP], until_epochs=[0]), "above 0 and ascending"),
        (dict(transforms=[FLIP, FLIP], until_shares=[1.0]), r"until_shares is \[1.0\] .*between 0 and 1 and ascending"),
        (dict(transforms=[FLIP, FLIP], until_shares=[]), r"until_shares is \[\] for 2 transforms"),
        (dict(transforms=[FLIP, FLIP]), "got until_epochs=None and until_shares=None; expected one of them"),
        (dict(transforms=[FLIP, STAGES], until_epochs=[1]), "transforms has TransformsByEpoch, which cannot change"),
        (dict(transforms=["ClassificationTrainTransforms", FLIP], until_epochs=[1]), "has ClassificationTrainTransf"),
    ],
)
def test_impossible_epochs_are_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TransformsByEpoch(**arguments)


@pytest.mark.parametrize(
    ("num_epochs", "sides"), [(5, [32, 32, 32, 40, 40]), (2, [32, 32]), (1, [32]), (None, [32] * 3)]
)
def test_transforms_follow_shares_of_the_run(num_epochs, sides):
    transforms = dict(type="TransformsByEpoch", transforms=[resized(32), resized(40)], until_shares=[0.6])
    dataset = build_dataset(dict(WORLD, transforms=transforms))
    if num_epochs is not None:
        dataset.set_num_epochs(num_epochs)
    for epoch, side in enumerate(sides):
        dataset.set_epoch(epoch)
        assert dataset[0]["image"].shape == (3, side, side)


class SizeOfEpoch(Hook):
    """Records the size of the images that the model gets in each epoch."""

    def __init__(self):
        self.sizes = {}

    @contextmanager
    def during_training(self, run):
        def record(model, inputs):
            if model.training:
                self.sizes.setdefault(run.progress.epoch, set()).add(tuple(inputs[0].shape[2:]))

        handle = run.model.backbone.register_forward_pre_hook(record)
        yield
        handle.remove()


def test_run_tells_its_workers_the_number_of_epochs_also_when_it_is_resumed_with_another_one(tmp_path):
    """Stages end at 0.6 of the run: of 5 epochs after the third, of 10 after the sixth."""
    config = load_config(QUICKSTART)
    stages = dict(type="TransformsByEpoch", transforms=[resized(32), resized(40)], until_shares=[0.6])
    config["data"]["train"].update(num_images=4, transforms=stages)
    config["data"].update(images_per_gpu=2, num_workers=1)
    config["data"]["val"].update(num_images=1)
    config["train"].update(epochs=5, eval_every=10)
    config["schedule"] = dict(type="FlatCosineLR", flat_until_share=0.6)
    first, second = SizeOfEpoch(), SizeOfEpoch()
    run = train(config, run_dir=tmp_path / "run", device="cpu", hooks=[first])
    assert first.sizes == {epoch: {(32, 32)} if epoch < 3 else {(40, 40)} for epoch in range(5)}
    train(resume=run.path, device="cpu", hooks=[second], train=dict(epochs=10))
    assert second.sizes == {epoch: {(32, 32)} if epoch < 6 else {(40, 40)} for epoch in range(5, 10)}


def test_only_the_transforms_of_a_training_dataset_change():
    with pytest.raises(ConfigError, match="is for the transforms of a dataset itself"):
        TransformsByEpoch(transforms=[FLIP], until_epochs=[])(AnnotatedImage(np.zeros((4, 4, 3), np.uint8)))
    data = DataSettings(train=WORLD, val=dict(WORLD, transforms=STAGES))
    with pytest.raises(ConfigError, match=r"data\.val\.transforms: TransformsByEpoch is for training"):
        data.dataset("val")
    with pytest.raises(ConfigError, match="ShapesSegmentation: GridMosaic needs images with boxes"):
        build_dataset(dict(type="ShapesSegmentation", num_images=2, transforms=STAGES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(squares=dict(sizes=[])), r"data\.squares\.sizes: got \[\]"),
        (dict(squares=dict(sizes=[32, 0])), r"data\.squares\.sizes: got \[32, 0\]"),
        (dict(squares=dict(sizes=[32], until_epoch=3)), "until_epoch is 3 and final_size is None; expected both"),
        (dict(mixup=dict(probability=0.5)), r"data\.mixup: mixes images of one size\. Set data\.squares"),
        (dict(squares=dict(sizes=[32]), mixup=dict(probability=2)), r"data\.mixup\.probability: got 2"),
        (dict(squares=dict(sizes=[32]), mixup=dict(share=[0.5, 0.4])), r"data\.mixup\.share: got \[0\.5, 0\.4\]"),
        *(
            ({name: value, "tokens_per_gpu": 9}, rf"data\.{name}: is for images only; leave it out")
            for name, value in dict(
                squares={"sizes": [32]}, sampler="repeat_factor", repeated_augmentation=2, prompts={}
            ).items()
        ),
    ],
)
def test_impossible_batches_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        DataSettings(**options)


def test_config_keys_of_batches_are_checked():
    cfg = load_config("configs/quickstart/detr.py")
    cfg["data"].update(squares=dict(SQUARES), mixup=dict(MIXUP))
    cfg["data"]["train"]["transforms"] = STAGES
    check_config(cfg)
    cfg["data"]["squares"]["size"] = 3
    with pytest.raises(ConfigError, match=r"data\.squares\.size: unknown key 'size'. Did you mean 'sizes'"):
        check_config(cfg)
    del cfg["data"]["squares"]["size"]
    cfg["data"]["train"]["transforms"] = dict(STAGES, transforms=[FLIP, "ComposedTransformz", FLIP])
    with pytest.raises(ConfigError, match=r"data\.train\.transforms\.transforms\.1: .*'ComposedTransforms'"):
        check_config(cfg)


def test_clips_are_not_squares():
    with pytest.raises(ConfigError, match=r"data\.squares: expected images, got a sample of shape \(3, 2, 4, 4\)"):
        squash(Sample(image=torch.zeros(3, 2, 4, 4, dtype=torch.uint8), target={}), 4)
    # a dataset without epochs needs no methods of its own
    assert PlainDataset().set_epoch(3) is None and PlainDataset().set_num_epochs(5) is None


def test_objects_that_are_small_in_the_square_are_removed():
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.5, 0.5, 0.1, 0.5], [0.5, 0.5, 0.5, 0.1], [0.5, 0.5, 1.0, 1.0]])
    target = {"labels": torch.arange(4), "boxes_cxcywh": boxes, "masks": torch.ones(4, 40, 60, dtype=torch.bool)}
    samples = [Sample(image=torch.zeros(3, 40, 60, dtype=torch.uint8), target=target)]
    (squared,) = BatchAugmentation(dict(sizes=[20], min_box_side=3.0), None)(samples, 0, 0)
    assert squared["target"]["labels"].tolist() == [0, 3] and len(squared["target"]["masks"]) == 2
    assert torch.equal(squared["target"]["boxes_cxcywh"], boxes[[0, 3]]) and len(target["labels"]) == 4
    (squared,) = BatchAugmentation(dict(sizes=[20]), None)(samples, 0, 0)
    assert squared["target"]["labels"].tolist() == [0, 1, 2, 3]
    target["phrase_spans"] = [[(i, i + 1)] for i in range(4)]
    (squared,) = BatchAugmentation(dict(sizes=[20], min_box_side=3.0), None)(samples, 0, 0)
    assert squared["target"]["phrase_spans"] == [[(0, 1)], [(3, 4)]] and len(target["phrase_spans"]) == 4
    with pytest.raises(ConfigError, match=r"data\.squares\.min_box_side: got -1"):
        Squares(sizes=[20], min_box_side=-1)
