import json
import pickle

import numpy as np
import pytest
from helpers.located_texts import (
    CAPTION,
    HEIGHT,
    INSTANCES,
    REGIONS,
    WIDTH,
    detection_line,
    grounding_line,
    image_line,
    write_flickr30k,
    write_images,
    write_mdetr,
    write_odvg,
    write_refcoco,
)

from vitkit.apps.starter.samples import describe, draw_sample
from vitkit.data.datasets.grounding import GroundingDataset
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import ConfigError, DataError
from vitkit.text.class_prompts import Prompts, PromptStep


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images", "a.jpg", "b.jpg", "12.jpg")


def named(sample):
    """Return what names each object of a sample: its phrase, or the part of it that its spans are."""
    target = sample["target"]
    phrases = [target["phrases"][label] for label in target["labels"].tolist()]
    spans = target.get("phrase_spans")
    return (
        phrases
        if spans is None
        else ["|".join(phrase[begin:end] for begin, end in of_object) for phrase, of_object in zip(phrases, spans)]
    )


def boxes_xyxy(sample):
    x, y, w, h = (sample["target"]["boxes_cxcywh"].numpy() * ([WIDTH, HEIGHT] * 2)).T
    return np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=1).round(3).tolist()


def test_a_caption_is_a_prompt_of_its_sentences_and_objects_are_named_by_characters(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line())
    dataset = build_dataset(dict(type="GroundingDataset", images=str(images), annotations=str(path)))
    sample = dataset[0]
    assert sample["target"]["phrases"] == ["A hot dog and a dog", "The dog is red"]
    assert sample["target"]["labels"].tolist() == [0, 0, 0, 1]
    assert named(sample) == ["A hot dog", "a dog", "a dog", "The dog"]
    assert boxes_xyxy(sample) == [[2, 3, 12, 13], [20, 3, 30, 13], [5, 20, 15, 30], [20, 3, 30, 13]]
    assert list(dataset.phrases()) == sample["target"]["phrases"]
    assert dataset.classes is None and dataset.image_classes() is None
    located = dataset.located(0)
    assert located.regions.tolist() == [0, 1, 1, 2] and not located.is_expression


def test_objects_are_shown_with_the_words_that_name_them(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line(), detection_line())
    dataset = GroundingDataset(images, path)
    assert describe(dataset[0]["target"], dataset.classes) == "2 a dog, A hot dog, The dog"
    assert describe(dataset[1]["target"], dataset.classes) == "cat, dog"
    assert draw_sample(dataset[0], dataset.classes).shape == draw_sample(dataset[1], dataset.classes).shape


def test_objects_that_a_transform_removes_take_their_spans_along(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line())
    left = dict(type="ComposedTransforms", transforms=[dict(type="Crop", x_min=0, y_min=0, x_max=16, y_max=HEIGHT)])
    sample = GroundingDataset(images, path, transforms=left)[(0, 0)]
    assert named(sample) == ["A hot dog", "a dog"]
    assert sample["target"]["labels"].tolist() == [0, 0]


def test_transforms_that_combine_images_are_refused(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line())
    with pytest.raises(ConfigError, match="GroundingDataset: MultiImageTransforms needs images with boxes"):
        GroundingDataset(images, path, transforms=dict(type="MultiImageTransforms", mosaic=0.5))


@pytest.mark.parametrize(
    ("caption", "spans", "expected"),
    [
        ("a cat. A CAT . a dog", [[7, 12]], (["a cat", "a dog"], 0, "a cat")),  # a prompt has each phrase once
        ("see St. Bernard now", [[4, 15]], (["see St", "Bernard now"], 1, "Bernard")),  # the longer part
        ("  a big  cat?!", [[4, 7], [9, 12]], (["a big  cat", "!"], 0, "big|cat")),
        ("...", None, None),
    ],
)
def test_captions_are_split_where_a_prompt_ends_phrases(tmp_path, images, caption, spans, expected):
    lines = [dict(bbox=[1, 1, 9, 9], phrase="".join(caption[b:e] for b, e in spans or ()), tokens_positive=spans)]
    path = write_odvg(tmp_path / "train.jsonl", grounding_line(caption=caption, regions=lines))
    if expected is None:
        with pytest.raises(DataError, match=r"train.jsonl line 1: the caption is '...'; expected a text with a word"):
            GroundingDataset(images, path)
        return
    sample = GroundingDataset(images, path)[0]
    phrases, label, name = expected
    assert (sample["target"]["phrases"], sample["target"]["labels"].tolist()) == (phrases, [label])
    assert named(sample) == [name]


def test_an_expression_is_one_phrase_without_the_marks_that_would_end_it(tmp_path, images):
    path = write_refcoco(tmp_path / "refcoco")
    dataset = GroundingDataset(images, path, split="val")
    assert [named(dataset[k]) for k in range(len(dataset))] == [["left man"], ["Mr Left"]]
    assert "phrase_spans" not in dataset[0]["target"] and dataset.located(1).is_expression
    assert boxes_xyxy(dataset[1]) == [[2, 3, 12, 13]]
    assert len(GroundingDataset(images, path)) == 3
    with pytest.raises(DataError, match="has no split 'testC'; it has testA, val"):
        GroundingDataset(images, path, split="testC")


def test_flickr30k_has_a_sample_for_each_sentence(tmp_path, images):
    dataset = GroundingDataset(images, write_flickr30k(tmp_path / "flickr"), split="val")
    first, second = dataset[0], dataset[1]
    assert first["target"]["phrases"] == ["Two men in red hats wait"]
    assert named(first) == ["Two men", "Two men", "red hats"]
    assert boxes_xyxy(first) == [[2, 3, 11, 12], [20, 3, 29, 12], [4, 1, 13, 10]]
    assert named(second) == ["Men", "Men"]  # neither a scene nor what is not visible has a box
    assert dataset.located(0).regions.tolist() == [0, 0, 1]


def test_mdetrs_json_is_read(tmp_path, images):
    dataset = GroundingDataset(images, write_mdetr(tmp_path / "mdetr.json"))
    assert named(dataset[0]) == ["A hot dog", "a dog", "a dog"]
    assert named(dataset[1]) == ["left man"] and dataset.located(1).is_expression


def test_lines_with_classes_are_samples_of_classes(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", detection_line(), grounding_line("b.jpg"), detection_line(instances=[]))
    dataset = GroundingDataset(images, path)
    assert (dataset.classes, dataset.category_ids) == (["dog", "cat"], [1, 4])
    assert dataset[0]["target"]["labels"].tolist() == [1, 0] and "phrases" not in dataset[0]["target"]
    assert "phrases" in dataset[1]["target"] and not len(dataset[2]["target"]["labels"])
    assert [column.tolist() for column in dataset.image_classes()] == [[0, 0], [0, 1]]
    (tmp_path / "map.json").write_text(json.dumps({"4": "cat", "1": "dog", "9": "bird"}))
    assert GroundingDataset(images, path, label_map=tmp_path / "map.json").classes == ["dog", "cat", "bird"]


def test_without_places_of_phrases_the_prompt_is_made_of_them(tmp_path, images):
    regions = [dict(bbox=[1, 1, 9, 9], phrase=phrase) for phrase in ("dog", "hot dog", "Dog")]
    path = write_odvg(tmp_path / "train.jsonl", grounding_line(caption="a hot dog and dogs", regions=regions))
    sample = GroundingDataset(images, path)[0]
    assert sample["target"]["phrases"] == ["dog", "hot dog"] and sample["target"]["labels"].tolist() == [0, 1, 0]
    assert named(sample) == ["dog", "hot dog", "dog"]


def region(**changes):
    return grounding_line(regions=[REGIONS[0] | changes])


def instance(**changes):
    return detection_line(instances=[INSTANCES[0] | changes])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"filename": "a.jpg",', r"line 2: not valid JSON at column 22"),
        ("[1]", r"line 2: is \[1\]; expected an object"),
        ('{"a": 1, "a": 2}', "line 2: an object has the key 'a' twice"),
        (image_line(), "line 2: has neither detection nor grounding; expected one"),
        (grounding_line() | detection_line(), "line 2: has detection and grounding; expected one"),
        (detection_line() | dict(width=None), "line 2: has filename 'a.jpg', height 32 and width None"),
        (instance(label=7), "line 2: label 7 is not one of the 2 of the label map"),
        (instance(label="4"), "line 2: label is '4'; expected a whole number"),
        (instance(category="dog"), "line 2: label 4 is 'dog', and 'cat' in the label map"),
        (instance(bbox=[1, 2, 3]), r"line 2: bbox is \[1, 2, 3\]; expected \[x0, y0, x1, y1\]"),
        (instance(bbox=[30, 20, 10, 10]), r"line 2: bbox is .*; expected corners .* not a width and height"),
        (instance(bbox=[50, 2, 60, 12]), r"line 2: bbox \[50.0, 2.0, 60.0, 12.0\] has no area in its image 'a.jpg'"),
        (instance(bbox=[1, 2, 1e999, 4]), "line 2: a coordinate of bbox is inf"),
        (region(tokens_positive=[[30, 40]]), r"line 2: tokens_positive has \[30, 40\], and the caption 36 characters"),
        (region(tokens_positive=[[3, 3]]), r"line 2: tokens_positive has \[3, 3\]"),
        (region(tokens_positive=[[19, 21]]), r"line 2: tokens_positive \[\[19, 21\]\] name no word"),
        (region(tokens_positive=[0, 9]), r"line 2: tokens_positive is \[0, 9\]; expected a list of \[begin, end\]"),
        (region(tokens_positive=[[0.0, 9]]), r"line 2: tokens_positive is .*; expected a list"),
        (
            region(tokens_positive=[[1, 4]]),
            "line 2: tokens_positive stand for ' ho', the phrase is 'A hot dog'.*tokens",
        ),
        (region(phrase=" "), "line 2: a region's phrase is ' '; expected a text"),
        (grounding_line(caption=""), "line 2: the caption is ''; expected a text with a word"),
        (grounding_line(caption=None), "line 2: the caption is None"),
        (grounding_line(regions={}), "line 2: regions is {}; expected a list"),
        (grounding_line("../a.jpg"), r"'\.\./a.jpg'"),
        (
            grounding_line(regions=[REGIONS[0], dict(bbox=[1, 1, 9, 9], phrase="dog")]),
            "has no tokens_positive, and others",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path, images, line, message):
    first = detection_line() if isinstance(line, str) or "grounding" not in line else detection_line(instances=[])
    path = write_odvg(tmp_path / "train.jsonl", first, line)
    (tmp_path / "map.json").write_text(json.dumps({"1": "dog", "4": "cat"}))
    with pytest.raises(DataError, match=message) as error:
        GroundingDataset(images, path, label_map=tmp_path / "map.json")
    assert "\n" not in str(error.value) and "train.jsonl" in str(error.value)


def test_a_few_phrases_that_differ_from_their_characters_are_only_logged(tmp_path, images, caplog):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line(), region(phrase="sausage"))
    assert len(GroundingDataset(images, path)) == 2
    assert "line 2: tokens_positive stand for 'A hot dog', the phrase is 'sausage'; so in 1 of 4 regions" in caplog.text


def test_bad_boxes_can_be_dropped(tmp_path, images):
    lines = [REGIONS[1] | dict(bbox=[[50, 1, 60, 9], [1, 1, 9, 9]]), REGIONS[0] | dict(bbox=[3, 3, 3, 9])]
    path = write_odvg(tmp_path / "train.jsonl", grounding_line(regions=lines))
    sample = GroundingDataset(images, path, bad_boxes="drop")[0]
    assert named(sample) == ["a dog"]


def test_missing_images_and_other_sizes_are_errors(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line("none.jpg"))
    with pytest.raises(DataError, match=r"train.jsonl' lists 'none.jpg', which is not in"):
        GroundingDataset(images, path)
    path = write_odvg(tmp_path / "train.jsonl", grounding_line() | dict(height=99))
    with pytest.raises(DataError, match="is 40x32 pixels .* annotated as 40x99"):
        GroundingDataset(images, path)[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cos\nsystem\n(S'echo broken'\ntR.", r"names os.system, which could run code"),
        (pickle.dumps(np.zeros(3)), r"names numpy\S+, which could run code"),
        (b"\x80\x02", "cannot read .* as a pickle"),
        (b"", "cannot read .* as a pickle: Ran out of input"),
        (pickle.dumps({"a": 1}), "expected a list of RefCOCO's references"),
        (pickle.dumps([dict(ann_id=1, image_id=5)]), "reference 0: is .*expected numbers ann_id and image_id"),
        (pickle.dumps([dict(ann_id=1, image_id=5, sentences=[])]), "instances.json has no annotation 1 with image 5"),
        (pickle.dumps([dict(ann_id=7, image_id=5, sentences=[{}])]), "reference 0: the caption is None"),
    ],
)
def test_a_wrong_pickle_runs_nothing_and_is_named(tmp_path, images, content, message):
    path = write_refcoco(tmp_path / "refcoco")
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        GroundingDataset(images, path)
    assert "\n" not in str(error.value) and "refs(unc).p" in str(error.value)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("Annotations/12.xml", lambda text: text[:100], r"12.xml' as XML"),
        ("Annotations/12.xml", lambda text: text.replace("<xmin>3<", "<xmin>x<"), "12.xml: '1': bndbox is 'x'"),
        ("Annotations/12.xml", lambda text: text.replace("<width>40<", "<width><"), "12.xml: has filename '12.jpg'"),
        ("Sentences/12.txt", lambda text: text.replace("Two men]", "Two men"), "12.txt line 1: has a phrase that does"),
        (
            "Sentences/12.txt",
            lambda text: text.replace("Two men]", " ]"),
            "12.txt line 1: the phrase of entity 1 is empty",
        ),
        ("val.txt", lambda text: "13\n", r"cannot read '.*13.xml'"),
        ("val.txt", lambda text: "../12\n", r"val.txt: has '\.\./12'"),
    ],
)
def test_wrong_files_of_flickr30k_are_named(tmp_path, images, part, change, message):
    folder = write_flickr30k(tmp_path / "flickr")
    (folder / part).write_text(change((folder / part).read_text()))
    with pytest.raises(DataError, match=message) as error:
        GroundingDataset(images, folder, split="val")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(format="coco"), "format: no 'coco'"),
        (dict(split="val"), "split='val': ODVG's JSON lines has one split in each file"),
        (dict(bad_boxes="keep"), "bad_boxes is 'keep'"),
        (dict(first=0), "first: got 0"),
        (dict(format="mdetr", label_map="x.json"), "label_map: only ODVG has classes, not MDETR's JSON"),
    ],
)
def test_wrong_arguments_are_errors(tmp_path, images, options, message):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line())
    with pytest.raises((ConfigError, DataError), match=message):
        GroundingDataset(images, path, **options)


@pytest.mark.parametrize("content", [[], {}, {"a": "cat"}, {"0": ""}, {"0": "cat", "1": "cat"}, {"01": "cat"}])
def test_wrong_label_maps_are_errors(tmp_path, images, content):
    path = write_odvg(tmp_path / "train.jsonl", detection_line())
    (tmp_path / "map.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="map.json"):
        GroundingDataset(images, path, label_map=tmp_path / "map.json")


def test_caption_of_the_helpers_is_what_its_regions_say():
    assert [CAPTION[b:e] for r in REGIONS for b, e in r["tokens_positive"]] == [r["phrase"] for r in REGIONS]


def test_a_prompt_has_the_tokens_of_the_characters_that_name_each_object(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", detection_line(), grounding_line())
    dataset = GroundingDataset(images, path)
    dataset.prompts = Prompts(negatives=1)
    step = PromptStep(dataset, training=True)
    (classes, caption), prompt = step([dataset[0], dataset[1]], [0, 1])
    vocabulary = dataset.target_vocabulary
    words = [vocabulary.decode([vocabulary.numbers.index(t)]).strip() for t in prompt.tokens[1].tolist()[1:13]]
    assert words == ["a", "hot", "dog", "and", "a", "dog", ".", "the", "dog", "is", "red", "."]
    named = [
        " ".join(word for word, is_named in zip(words, row[1:].tolist()) if is_named)
        for row in caption["target"]["positive_map"]
    ]
    assert named == ["a hot dog", "a dog", "a dog", "the dog"]
    assert prompt.phrase_ids[1].tolist()[:14] == [-1, *[0] * 7, *[1] * 5, -1]
    target = classes["target"]
    assert [target["phrases"][label] for label in target["labels"]] == ["cat", "dog"]
    assert "positive_map" not in target and {*target["phrases"]} == {"cat", "dog"}
