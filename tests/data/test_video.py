"""Datasets of videos: lists, folders, sampling of frames, views, and errors."""

import json

import numpy as np
import pytest
import torch
from helpers.video_files import number_of, numbered_frame, write_video
from PIL import Image

from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import ConfigError, DataError
from vitkit.structures import Batch

CLIP = dict(num_frames=4, sampling_rate=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two classes: a video file of 40 frames, one of 10, and a folder of 12 frames."""
    root = tmp_path_factory.mktemp("videos")
    for name in ("run", "jump high"):
        (root / name / "c").mkdir(parents=True)
        write_video(root / name / "a.mp4", bf="2")
        write_video(root / name / "b.mp4", 10)
        for number in range(12):
            Image.fromarray(numbered_frame(number, 48, 64)).save(root / name / "c" / f"{number}.png")
    return root


def numbers_in(clip):
    return [number_of(frame) for frame in clip.permute(1, 2, 3, 0).numpy()]


def times(num_frames, rate=30):
    return np.arange(num_frames) / rate


def numbers(length, rate=30, seed=0, **settings):
    sampling = ClipSampling(**settings)
    return sampling.numbers(times(length, rate), np.random.default_rng(seed), "a").tolist()


def test_a_clip_spans_its_frames_times_the_rate():
    # linspace(0, 15, 4) from frame 12 of 40, as the original's code.
    assert numbers(40, **CLIP) == [[12, 17, 22, 27]]


def test_a_clip_spans_as_many_seconds_at_another_frame_rate():
    assert numbers(80, rate=60, **CLIP) == [[24, 34, 44, 54]]
    assert numbers(20, rate=15, **CLIP) == [[5, 8, 10, 13]]


def test_clips_are_spread_from_start_to_end():
    assert numbers(40, num_clips=3, **CLIP) == [[0, 5, 10, 15], [12, 17, 22, 27], [24, 29, 34, 39]]


def test_jitter_starts_anywhere_depending_on_its_seed():
    starts = {numbers(40, seed=seed, temporal_jitter=True, **CLIP)[0][0] for seed in range(300)}
    assert starts == set(range(24))
    assert numbers(40, seed=3, temporal_jitter=True, **CLIP) == numbers(40, seed=3, temporal_jitter=True, **CLIP)


def test_each_segment_gives_its_middle_or_a_random_frame():
    segments = dict(num_frames=4, sampling_rate=None)
    assert numbers(41, **segments) == [[5, 15, 25, 35]]
    drawn = np.array([numbers(41, seed=seed, temporal_jitter=True, **segments)[0] for seed in range(300)])
    assert drawn.min(axis=0).tolist() == [0, 10, 20, 30]
    assert drawn.max(axis=0).tolist() == [10, 20, 30, 40]


def test_a_short_video_repeats_its_last_frame_or_is_an_error():
    assert numbers(10, **CLIP) == [[0, 5, 9, 9]]
    assert numbers(1, **CLIP) == [[0, 0, 0, 0]]
    with pytest.raises(DataError, match=r"video 'a' is too short: it has 10 frames in 0.30 s, a clip needs 0.50 s"):
        numbers(10, on_short="raise", **CLIP)
    assert numbers(16, on_short="raise", **CLIP) == [[0, 5, 10, 15]]


@pytest.mark.parametrize(
    "wrong",
    [dict(num_frames=0), dict(frame_rate=0), dict(on_short="skip"), dict(sampling_rate=None, num_clips=2)],
    ids=str,
)
def test_invalid_settings_are_errors(wrong):
    with pytest.raises(ConfigError, match=next(reversed(wrong))):
        ClipSampling(**wrong)


def test_a_folder_has_a_folder_of_videos_for_each_class(root):
    dataset = build_dataset(dict(type="VideoFolder", folder=str(root), **CLIP))
    assert dataset.classes == ["jump high", "run"]
    assert dataset.image_ids[:4] == ["jump high/a.mp4", "jump high/b.mp4", "jump high/c", "run/a.mp4"]
    sample = dataset[3]
    assert sample["image"].shape == (3, 4, 48, 64)
    assert sample["target"] | {"label": 1, "image_id": "run/a.mp4", "original_size": (48, 64)} == sample["target"]
    assert numbers_in(sample["image"]) == [12, 17, 22, 27]
    assert numbers_in(dataset[2]["image"]) == [0, 5, 10, 11]
    assert [dataset[k]["target"]["is_padded"] is True for k in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("separator", [" ", ",", "\t", ", "])
def test_a_list_gives_paths_and_labels(root, tmp_path, separator):
    lines = [f"{name}{separator}{label}" for name, label in (("run/a.mp4", 1), ("jump high/b.mp4", 0))]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n\n")
    dataset = build_dataset(dict(type="VideoList", list_file=str(tmp_path / "list.csv"), folder=str(root), **CLIP))
    assert dataset.image_ids == ["run/a.mp4", "jump high/b.mp4"]
    assert [dataset[k]["target"]["label"] for k in range(2)] == [1, 0]
    assert dataset.classes == ["0", "1"]


def test_labels_of_a_list_may_be_names_with_spaces(root, tmp_path):
    (tmp_path / "list.txt").write_text('run/a.mp4 run\njump high/b.mp4 jump high\njump high/c,"jump high"\n')
    (tmp_path / "classes.txt").write_text("run\njump high\n")
    files = dict(list_file=str(tmp_path / "list.txt"), class_file=str(tmp_path / "classes.txt"))
    dataset = build_dataset(dict(type="VideoList", folder=str(root), **files, **CLIP))
    assert dataset.image_ids == ["run/a.mp4", "jump high/b.mp4", "jump high/c"]
    assert dataset.image_classes()[1].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run/a.mp4 7\n", r"line 1: 'run/a.mp4 7': label 7 is outside the 2 classes of class_file, 0 to 1"),
        ("run/a.mp4 0\nrun/a.mp4 rum\n", r"line 2.*label 'rum' is neither a number.*Did you mean 'run'"),
        ("run/a.mp4\n", "line 1.*expected a path and a label"),
        ("run/a.mp4 -1\n", "label '-1' is neither"),
        ("../a.mp4 0\n", "outside the folder"),
        ("run/a.mp4 0\nrun/z.mp4 1\n", r"1 of 2 videos do not exist, the first is '.*run/z\.mp4'"),
        ("\n", "is empty"),
    ],
)
def test_invalid_lists_are_errors(root, tmp_path, text, message):
    (tmp_path / "list.txt").write_text(text)
    (tmp_path / "classes.txt").write_text("run\njump high\n")
    files = dict(list_file=str(tmp_path / "list.txt"), class_file=str(tmp_path / "classes.txt"))
    with pytest.raises(DataError, match=message):
        build_dataset(dict(type="VideoList", folder=str(root), **files, **CLIP))


def test_missing_videos_may_be_left_out(root, tmp_path, caplog):
    (tmp_path / "list.txt").write_text("run/z.mp4 0\nrun/a.mp4 1\n")
    spec = dict(type="VideoList", list_file=str(tmp_path / "list.txt"), folder=str(root), on_missing="skip", **CLIP)
    assert build_dataset(spec).image_ids == ["run/a.mp4"]
    assert "1 of 2 videos do not exist" in caplog.text


def something(tmp_path, root, annotations, labels):
    (tmp_path / "train.json").write_text(json.dumps(annotations))
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    files = dict(annotations=str(tmp_path / "train.json"), labels=str(tmp_path / "labels.json"))
    return build_dataset(dict(type="SomethingSomething", folder=str(root / "run"), num_frames=4, **files))


def test_something_something_uses_templates_as_classes(root, tmp_path):
    labels = {"Holding something": "1", "Dropping something onto something": "0"}
    entries = [
        {"id": "a", "label": "holding a cup", "template": "Holding [something]"},
        {"id": "c", "template": "Dropping [something] onto [something]"},
    ]
    dataset = something(tmp_path, root, entries, labels)
    assert dataset.classes == ["Dropping something onto something", "Holding something"]
    assert dataset.image_ids == ["a.mp4", "c"]
    assert [dataset[k]["target"]["label"] for k in range(2)] == [1, 0]
    assert numbers_in(dataset[0]["image"]) == [5, 15, 24, 34]


@pytest.mark.parametrize(
    ("entries", "labels", "message"),
    [
        ([{"id": "a", "template": "Hold"}], {"Holding": "0"}, "template 'Hold' is not in .*Did you mean 'Holding'"),
        ([{"id": "a"}], {"Holding": "0"}, 'annotation 0 is .*expected an object with "id" and "template"'),
        ([{"id": "q", "template": "Holding"}], {"Holding": "0"}, "1 of 1 videos do not exist"),
        ([{"id": "a", "template": "Holding"}], {"Holding": "1"}, "does not number its classes from 0"),
        ({}, {"Holding": "0"}, "is not a list of videos"),
    ],
)
def test_invalid_something_something_files_are_errors(root, tmp_path, entries, labels, message):
    with pytest.raises(DataError, match=message):
        something(tmp_path, root, entries, labels)


def test_a_class_without_videos_is_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"class folder '.*run' contains no videos"):
        build_dataset(dict(type="VideoFolder", folder=str(tmp_path)))


def test_a_damaged_video_is_skipped_in_training_and_counted(root, tmp_path):
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    (tmp_path / "good.mp4").write_bytes((root / "run" / "a.mp4").read_bytes())
    (tmp_path / "list.txt").write_text("good.mp4 0\nbad.mp4 0\n")
    spec = dict(type="VideoList", list_file=str(tmp_path / "list.txt"), folder=str(tmp_path), **CLIP)
    settings = DataSettings(train=spec, images_per_gpu=2, num_workers=0, on_error="skip")
    dataset = settings.dataset("train")
    loader = settings.train_loader(dataset, seed=0)
    (batch,) = loader
    assert loader.num_skipped >= 1
    assert {target["image_id"] for target in batch.targets} == {"good.mp4"}
    with pytest.raises(DataError, match=r"cannot decode '.*bad\.mp4'"):
        dataset[1]


TRAIN = dict(type="ClipTrainTransforms", size=32, short_sides=(40, 48))


def test_all_frames_of_a_clip_share_a_crop_that_differs_between_clips(root):
    for transforms in (TRAIN, dict(type="ClassificationTrainTransforms", size=32, rand_augment="rand-m7-n4-mstd0.5")):
        spec = dict(type="VideoFolder", folder=str(root), transforms=transforms, num_frames=3, sampling_rate=1)
        dataset = build_dataset(spec)
        dataset.open = lambda index: SameFrames()
        clips = [dataset[0, seed]["image"] for seed in range(6)]
        assert all((clip[:, 0] == clip[:, k]).all() for clip in clips for k in (1, 2))
        assert not any((clip == clips[0]).all() for clip in clips[1:])
        assert (dataset[0, 4]["image"] == clips[4]).all()


class SameFrames:
    """A video whose frames are all equal."""

    times = times(9)

    def frames(self, wanted):
        return (np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8) for _ in wanted)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def test_each_clip_and_crop_is_a_view_and_a_sample_of_the_batch(root):
    transforms = dict(type="ClipEvalTransforms", size=40, short_side=48, num_crops=3)
    dataset = build_dataset(dict(type="VideoFolder", folder=str(root), transforms=transforms, num_clips=2, **CLIP))
    image = dataset[3]["image"]
    assert image.shape == (6, 3, 4, 40, 40)
    frames = torch.from_numpy(np.stack([numbered_frame(k, 48, 64) for k in (0, 24)])).permute(0, 3, 1, 2)
    for view, (clip, left) in enumerate([(0, 0), (0, 12), (0, 24), (1, 0), (1, 12), (1, 24)]):
        expected = frames[clip, :, 4:44, left : left + 40]
        assert (image[view, :, 0].int() - expected).abs().float().mean() < 8
    batch = Batch.collate([dataset[3], dataset[4]])
    assert batch.inputs["images"].shape == (12, 3, 4, 40, 40)
    assert [target["image_id"] for target in batch.targets] == ["run/a.mp4"] * 6 + ["run/b.mp4"] * 6
    assert "padding_mask" not in batch.inputs


def test_crops_of_portrait_videos_go_from_top_to_bottom():
    from vitkit.data.transforms.annotated_image import AnnotatedImage
    from vitkit.data.transforms.clips import ClipEvalTransforms

    image = np.broadcast_to(np.arange(90, dtype=np.uint8)[:, None, None], (90, 30, 3))
    views = ClipEvalTransforms(size=30, short_side=30, num_crops=3).views
    assert [int(view(AnnotatedImage(image)).image[0, 0, 0]) for view in views] == [0, 30, 60]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (dict(type="ClipTrainTransforms", size=64, short_sides=(32, 40)), "size <= minimum <= maximum"),
        (dict(type="ClipEvalTransforms", size=64, short_side=32), "1 <= size <= short_side"),
        (dict(type="ClipEvalTransforms", num_crops=0), "at least one crop"),
    ],
)
def test_invalid_crops_are_errors(root, spec, message):
    with pytest.raises(ConfigError, match=message):
        build_dataset(dict(type="VideoFolder", folder=str(root), transforms=spec))


def test_videos_of_several_sizes_need_transforms(root, tmp_path):
    (tmp_path / "run").mkdir()
    write_video(tmp_path / "run" / "a.mp4", 3)
    write_video(tmp_path / "run" / "b.mp4", 3, size=(32, 32))
    dataset = build_dataset(dict(type="VideoFolder", folder=str(tmp_path), num_frames=2, sampling_rate=1))
    assert dataset[0]["image"].shape == (3, 2, 48, 64)
    with pytest.raises(DataError, match="'run/b.mp4' is 32x32 pixels.*ClipEvalTransforms"):
        dataset[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_short_videos_are_named_once_and_counted_in_each_epoch(root, num_workers, caplog):
    transforms = dict(type="ClipEvalTransforms", size=40, short_side=48, num_crops=3)
    spec = dict(type="VideoFolder", folder=str(root), transforms=transforms, num_clips=2, **CLIP)
    settings = DataSettings(train=spec, val=spec, images_per_gpu=3, val_images_per_gpu=4, num_workers=num_workers)
    for split in ("train", "val"):
        dataset = settings.dataset(split)
        loader = settings.train_loader(dataset, seed=0) if split == "train" else settings.val_loader(dataset)
        caplog.clear()
        for epoch in range(2):
            if split == "train":
                loader.set_position(epoch)
            list(loader)
            assert loader.num_padded == 4  # of 6: the two of 40 frames are long enough
        assert caplog.text.count("is shorter than a clip") == 4
        for name in ("run/b.mp4", "run/c", "jump high/b.mp4", "jump high/c"):
            assert caplog.text.count(f"video '{name}' is shorter than a clip: its last frame is repeated.") == 1


def test_a_damaged_video_is_named_once_and_counted_each_time(root, tmp_path, caplog):
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    (tmp_path / "good.mp4").write_bytes((root / "run" / "a.mp4").read_bytes())
    (tmp_path / "list.txt").write_text("good.mp4 0\nbad.mp4 0\n")
    spec = dict(type="VideoList", list_file=str(tmp_path / "list.txt"), folder=str(tmp_path), **CLIP)
    settings = DataSettings(train=spec, images_per_gpu=2, num_workers=0, on_error="skip")
    loader = settings.train_loader(settings.dataset("train"), seed=0)
    for epoch in range(3):
        loader.set_position(epoch)
        list(loader)
    assert loader.num_skipped >= 3 and loader.num_padded == 0
    assert caplog.text.count("bad.mp4") == 1
