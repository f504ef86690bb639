import json
import logging

import cv2
import numpy as np
import pytest
import torch

from vitkit.data.datasets.captions import CocoCaptions, caption_words, read_caption_file
from vitkit.data.datasets.image_features import write_features
from vitkit.data.formats import read_annotations
from vitkit.data.loading.settings import DataSettings
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS
from vitkit.structures import BOS, EOS, PAD, UNK


@pytest.fixture
def folder(tmp_path):
    """Three images of 40x30 pixels, two captions each."""
    (tmp_path / "images").mkdir()
    for number in (1, 2, 3):
        cv2.imwrite(str(tmp_path / f"images/{number}.png"), np.full((30, 40, 3), 40 * number, np.uint8))
    texts = {1: ["A dog runs .", "The dog's running!"], 2: ["a cat sits", "A cat."], 3: ["a dog sits", "dog"]}
    content = {
        "images": [{"id": 10 * n, "file_name": f"{n}.png", "height": 30, "width": 40} for n in texts],
        "annotations": [
            {"id": 2 * n + k, "image_id": 10 * n, "caption": text} for n in texts for k, text in enumerate(texts[n])
        ],
    }
    (tmp_path / "captions.json").write_text(json.dumps(content))
    return tmp_path


def change(folder, edit):
    content = json.loads((folder / "captions.json").read_text())
    edit(content)
    (folder / "captions.json").write_text(json.dumps(content))


def dataset(folder, min_count=1, **arguments):
    return CocoCaptions(str(folder / "images"), str(folder / "captions.json"), min_count=min_count, **arguments)


def test_caption_is_split_into_words():
    assert caption_words(' "A black-and-white dog\'s - toy" , isn’t it_?\n') == "a black-and-white dog's toy isn't it"


def test_sample_has_tokens_and_all_references(folder):
    data = dataset(folder)
    sample = data[0]
    assert data.target_vocabulary.decode(sample["target"]["tokens"].tolist()) == "a dog runs"
    assert sample["target"]["tokens"][-1] == EOS
    assert sample["target"]["references"] == ["A dog runs .", "The dog's running!"]
    assert sample["target"]["image_id"] == 10
    assert sample["image"].shape == (3, 30, 40)
    assert data.aspect_ratios().tolist() == pytest.approx([4 / 3] * 3)


def test_the_seed_draws_the_caption(folder):
    data = dataset(folder)
    drawn = [tuple(data[(0, seed)]["target"]["tokens"].tolist()) for seed in range(20)]
    assert len(set(drawn)) == 2
    assert drawn == [tuple(data[(0, seed)]["target"]["tokens"].tolist()) for seed in range(20)]


def test_rare_words_are_unknown_and_validation_takes_the_trained_words(folder):
    train, val = dataset(folder, min_count=2), dataset(folder, min_count=None)
    with pytest.raises(DataError, match=r"has no vocabulary.*use_vocabularies_of"):
        val[0]
    val.use_vocabularies_of(train)
    assert val.target_vocabulary is train.target_vocabulary
    assert val[0]["target"]["tokens"].tolist()[2] == UNK  # "runs"
    assert val.target_vocabulary.unknown["runs"] == 1


def test_batches_hold_padded_captions(folder):
    loader = DataSettings(val_images_per_gpu=3, num_workers=0).val_loader(dataset(folder))
    (batch,) = loader
    captions = [target["tokens"].tolist() for target in batch.targets]
    longest = max(map(len, captions))
    expected = [[BOS, *tokens[:-1], *[PAD] * (longest - len(tokens))] for tokens in captions]
    assert batch.inputs["target_in"].tolist() == expected
    assert batch.inputs["images"].shape == (3, 3, 30, 40)


def test_captions_without_a_word_and_images_without_captions_are_counted(folder, caplog):
    def edit(content):
        content["annotations"][0]["caption"] = " ."
        content["annotations"][2]["caption"] = content["annotations"][3]["caption"] = ""

    change(folder, edit)
    with caplog.at_level(logging.INFO, "vitkit"):
        data = dataset(folder)
    assert [data.references(i) for i in range(len(data))] == [["The dog's running!"], ["a dog sits", "dog"]]
    assert "3 of 6 captions are left out: they have no word" in caplog.text
    assert "1 of 3 images are left out: without a caption" in caplog.text


def test_missing_images_are_an_error_or_counted(folder, caplog):
    (folder / "images/2.png").unlink()
    with pytest.raises(DataError, match=r"lists '2.png', which is not in .*\(1 of 3 images are missing\).*='drop'"):
        dataset(folder)
    with caplog.at_level(logging.INFO, "vitkit"):
        assert list(dataset(folder, missing_images="drop").image_ids) == [10, 30]
    assert "1 of 3 images are left out: without an image" in caplog.text


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["annotations"][1].update(image_id=99), r"annotation 3 .* has image_id 99; expected one of the 3"),
        (
            lambda c: c["annotations"][1].update(caption=None),
            r"annotation 3 \(image '1.png'\) has caption None; expected text",
        ),
        (lambda c: c["annotations"][1].pop("caption"), r"annotation 3 .* has no 'caption'"),
        (lambda c: c["images"][1].update(id=10), r"image 10 .* has id 10; expected an id that no earlier"),
        (lambda c: c.pop("annotations"), r"no list 'annotations'"),
        (lambda c: c.update(annotations=[{"image_id": 10, "caption": "!"}]), r"no caption in .* has a word"),
    ],
)
def test_wrong_files_are_named_errors(folder, edit, message):
    change(folder, edit)
    with pytest.raises(DataError, match=message):
        dataset(folder)


def test_only_the_first_images_are_kept(folder):
    (folder / "images/3.png").unlink()
    data = dataset(folder, first=2)
    assert list(data.image_ids) == [10, 20] and data.references(1) == ["a cat sits", "A cat."]
    with pytest.raises(ConfigError, match=r"first: got 0; expected at least 1, or none for all images"):
        dataset(folder, first=0)
    change(folder, lambda c: [a.update(caption="!") for a in c["annotations"][:2]])
    with pytest.raises(DataError, match=r"none of the first 1 images in .* has a caption"):
        dataset(folder, first=1)


def test_missing_files_are_named_errors(folder):
    with pytest.raises(DataError, match="images: no folder"):
        CocoCaptions(str(folder / "none"), str(folder / "captions.json"))
    with pytest.raises(DataError, match="annotations: no file"):
        CocoCaptions(str(folder / "images"), str(folder / "none.json"))


def test_synthetic_captions_contain_only_known_words():
    data = DATASETS.build("ShapesCaptions", num_images=20, max_objects=4)
    for index in range(len(data)):
        tokens = data[index]["target"]["tokens"].tolist()
        assert data.target_vocabulary.decode(tokens) == data.references(index)[0]
    assert data.target_vocabulary.unknown.total() == 0


def test_cached_features_replace_images(folder):
    images = dataset(folder)
    maps = torch.arange(3 * 2 * 2 * 2, dtype=torch.float32).view(3, 2, 2, 2)
    write_features(folder / "maps.npy", maps.split(2), images, weights_key=17)
    data = dataset(folder, features=str(folder / "maps.npy"))
    (batch,) = DataSettings(val_images_per_gpu=3, num_workers=0).val_loader(data)
    assert torch.equal(batch.inputs["features"], maps)
    assert batch.inputs["features_key"] == 17
    assert "images" not in batch.inputs


def test_features_of_other_images_or_transforms_are_refused(folder):
    resized = dict(type="ClassificationEvalTransforms", size=16)
    path = folder / "maps.npy"
    with pytest.raises(DataError, match=r"no file .*maps.npy.*data\.cache_features"):
        dataset(folder, features=str(path))
    write_features(path, [torch.zeros(3, 2, 2, 2)], dataset(folder), weights_key=17)
    with pytest.raises(DataError, match=r"computed with the transforms null; this dataset has .*size"):
        dataset(folder, transforms=resized, features=str(path))
    change(folder, lambda c: c["images"].reverse())
    with pytest.raises(DataError, match=r"belongs to 3 images \w+; this dataset has 3 images \w+\. Leave"):
        dataset(folder, features=str(path))
    change(folder, lambda c: c["images"].reverse())
    with pytest.raises(DataError, match=r"belongs to 3 images \w+; this dataset has 2 images of World\(.*split='val'"):
        DATASETS.build("ShapesCaptions", num_images=2, split="val", features=str(path))
    (folder / "cut.npy").write_bytes(path.read_bytes()[:-9])
    (folder / "cut.json").write_text(path.with_suffix(".json").read_text())
    with pytest.raises(DataError, match=r"features: cannot read '.*cut\.npy'.*data\.cache_features"):
        dataset(folder, features=str(folder / "cut.npy"))[0]
    (folder / "cut.json").write_text("[1]")
    with pytest.raises(DataError, match=r"features: '.*cut\.json' contains \[1\]; expected the description"):
        dataset(folder, features=str(folder / "cut.npy"))
    with pytest.raises(DataError, match=r"image 30 has a map of \(2, 2, 3\)"):
        write_features(path, [torch.zeros(2, 2, 2, 2), torch.zeros(1, 2, 2, 3)], dataset(folder), weights_key=1)
    assert dataset(folder, features=str(path)).features.weights_key == 17  # those written before
    assert not list(folder.glob("*.tmp"))


def test_features_may_be_written_by_several_runs_and_while_one_reads(folder):
    path, maps = folder / "maps.npy", torch.rand(3, 2, 64, 64)
    data = dataset(folder)
    write_features(path, [maps], data, weights_key=1)
    reading = dataset(folder, features=str(path))
    assert reading[0]["features"].equal(maps[0])

    def written_meanwhile():
        """Yield features during which another run writes its own."""
        yield maps[:2] + 1
        write_features(path, [maps + 2], data, weights_key=2)
        assert dataset(folder, features=str(path))[2]["features"].equal(maps[2] + 2)
        yield maps[2:] + 1

    write_features(path, written_meanwhile(), data, weights_key=3)
    assert reading[2]["features"].equal(maps[2])
    latest = dataset(folder, features=str(path))
    assert all(latest[k]["features"].equal(maps[k] + 1) for k in range(3))


def test_damaged_features_are_an_error_of_their_image_only(folder):
    path, maps = folder / "maps.npy", torch.rand(3, 2, 2, 2)
    write_features(path, [maps], dataset(folder), weights_key=1)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # in the last map
    path.write_bytes(content)
    data = dataset(folder, features=str(path))
    assert torch.equal(data[1]["features"], maps[1])
    with pytest.raises(DataError, match=r"'.*maps.npy' is damaged: map 2 is not what was written. Delete the file"):
        data[2]
    description = json.loads(path.with_suffix(".json").read_text())
    del description["checksums"]
    path.with_suffix(".json").write_text(json.dumps(description))
    with pytest.raises(DataError, match=r"'maps.json' has no checksum of each map.*data\.cache_features"):
        dataset(folder, features=str(path))[0]


def test_features_in_other_forms_are_read_or_are_an_error(folder):
    path, maps = folder / "maps.npy", torch.rand(3, 2, 2, 2)
    write_features(path, [maps], dataset(folder), weights_key=1)
    description = json.loads(path.with_suffix(".json").read_text())

    def data(array):
        np.save(path, array)
        count = len(array)
        cut = description | dict(shape=list(array.shape), checksums=description["checksums"][:count])
        path.with_suffix(".json").write_text(json.dumps(cut))
        return dataset(folder, features=str(path))

    assert torch.equal(data(np.asfortranarray(maps))[2]["features"], maps[2])
    with pytest.raises(DataError, match=r"'.*maps.npy' has 2 maps, none for image 2\."):
        data(maps[:2].numpy())[2]
    with pytest.raises(DataError, match=r"'.*maps.npy' is empty, float32 \[0, 2, 2, 2\]\."):
        data(maps[:0].numpy())[0]


def test_features_that_do_not_fit_on_the_disk_are_an_error(folder):
    # If they were mapped into memory, reading them would end the process by a signal.
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*maps\.npy'"):
            write_features(folder / "maps.npy", [torch.zeros(3, 64, 32, 32)], dataset(folder), weights_key=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (folder / "maps.json").exists()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("captions.txt", ["image,caption", 'b.png,"A red, small dog ."', "b.png,Dogs .", "a.png,A cat .",
                          "b.png,One dog ."]),
        ("results.csv", ["image_name| comment_number| comment", "b.png| 0| A red, small dog .", "b.png| 1| Dogs .",
                         "a.png| 0| A cat .", "b.png| 2| One dog ."]),
        ("Flickr8k.token.txt", ["b.png#0\tA red, small dog .", "b.png#1\tDogs .", "a.png#0\tA cat .",
                                "b.png#2\tOne dog ."]),
    ],
)  # fmt: skip
def test_captions_as_text_are_read(tmp_path, name, lines):
    for image in "ab":
        cv2.imwrite(str(tmp_path / f"{image}.png"), np.zeros((4, 6, 3), np.uint8))
    (tmp_path / name).write_text("\n".join([*lines, ""]))
    captions = CocoCaptions(tmp_path, tmp_path / name, min_count=1)
    assert [captions.file_name(k) for k in range(2)] == ["b.png", "a.png"]
    assert captions.references(0) == ["A red, small dog .", "Dogs .", "One dog ."]
    assert captions.references(1) == ["A cat ."]
    with pytest.raises(
        DataError, match=f"'.*{name}' has captions and no boxes. Train on it with the dataset CocoCaptions"
    ):
        read_annotations(tmp_path)
    (tmp_path / name).write_text("\n".join([*lines, "c.png"]))
    with pytest.raises(DataError, match=f"{name} line {len(lines) + 1}: expected an image and a caption"):
        CocoCaptions(tmp_path, tmp_path / name)
    (tmp_path / name).write_text("dogs and cats")
    with pytest.raises(DataError, match=f"{name}: begins with 'dogs and cats'; expected image,caption, or lines of"):
        CocoCaptions(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("text", "captions"),
    [
        ("image,caption\na.png,A dog, and a cat run .\n", ["A dog, and a cat run ."]),
        ('image,caption\na.png,"A dog\n\n runs"\nb.png,A cat\n', ["A dog runs", "A cat"]),
        ('image|caption\na.png|"A dog runs .\nb.png|A cat | sits\n', ['"A dog runs .', "A cat | sits"]),
        ("image,caption,split\na.png,A dog\n", ["A dog"]),
    ],
)
def test_captions_in_tables_keep_their_words(tmp_path, text, captions):
    (tmp_path / "captions.txt").write_text(text)
    assert [*read_caption_file(tmp_path / "captions.txt")[1].values()] == [[caption] for caption in captions]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('a.png,A dog .\nb.png,"A cat .\nc.png,A cow .\n', "line 3: unexpected end of data. Close the quotes"),
        ('a.png,"A dog .\nb.png,A cat .\nc.png,A "cow"\n', "line 2: ',' expected after '\"'. Close the quotes"),
        ('a.png,"A dog .\nb.png,A cat .\nc.png,A cow"\n', "line 2: quotes enclose a line with another image. Close"),
    ],
)
def test_quotes_that_are_not_closed_are_an_error(tmp_path, rows, message):
    (tmp_path / "captions.txt").write_text(f"image,caption\n{rows}")
    with pytest.raises(DataError, match=message):
        read_caption_file(tmp_path / "captions.txt")


def test_delimiter_in_a_caption_before_the_last_column_is_an_error(tmp_path):
    (tmp_path / "captions.txt").write_text("image,caption,split\na.png,A dog, and a cat .,train\n")
    with pytest.raises(DataError, match="line 2: expected an image and a caption, as in the first line"):
        read_caption_file(tmp_path / "captions.txt")
