"""Texts that say what is where, LVIS's federated annotations, and the tokenizers that prompts are read with."""

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from fuzz.annotations import check_boxes, check_evaluation
from fuzz.formats import Format, naming, write_data, write_options
from fuzz.guard import guarded
from fuzz.hostile import CODE, NAMES, TEXTS, VALUES, encoded, mutate_xml, pick
from fuzz.isolation import LostError
from fuzz.mutate import mutate_bytes, mutate_json, mutate_value
from fuzz.world import HEIGHT, WIDTH, read_json

from vitkit.data.datasets.grounding import GroundingDataset
from vitkit.data.datasets.lvis import LvisDetection
from vitkit.errors import CheckpointError, DataError, VitkitError
from vitkit.evaluation.lvis import LvisEvaluator
from vitkit.text.class_prompts import Prompts, PromptStep
from vitkit.text.prompts import encode_phrases, split_phrases
from vitkit.weights.tokenizer_files import find_tokenizer

_CAPTION = "A hot dog and two dogs. The dog is red, said St. Bernard?"
_SPANS = ([[0, 9]], [[14, 22]], [[24, 31], [0, 1]], [[45, 56]])
_BOXES = ([4, 5, 15, 17], [[4, 5, 15, 17], [10, 8, 30, 30]], [0, 0, 40, 32], [2, 3.5, 20, 9])
_ODD_SPANS = (None, [], [[]], [[0, 0]], [[5, 2]], [[-1, 3]], [[0, 10**6]], [[0.0, 3.0]], [["0", 3]], [0, 3], [[22, 23]])
_ODD_SPANS += ([[True, 3]], [[0, 2**70]], [[0, 57]], [[3, 4], [3, 4]], -1, "0-3", {"0": 3})
_ODD_CAPTIONS = (
    *NAMES,
    ".",
    "...",
    "? .",
    "dog",
    "dog. dog. Dog .",
    "a" * 3000,
    "dog . " * 300,
    "é" * 90,
    "İ dog",
    None,
)
_IMAGES = [f"images/{k}.jpg" for k in range(3)]
_PICKLED = (b"cos\nsystem\n(S'touch marker'\ntR.", b"cbuiltins\nexec\n(S'" + CODE.encode() + b"'\ntR.")
_PICKLED += (pickle.dumps(np.zeros(2)), pickle.dumps(Path("x")), b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.")


def _line(k: int, rng: random.Random) -> dict[str, Any]:
    image = {"filename": f"{k}.jpg", "height": HEIGHT, "width": WIDTH}
    if rng.random() < 0.4:
        boxes = ([4, 5, 15, 17], [10, 8, 30, 30])
        instances = [{"bbox": b, "label": j, "category": ("cat", "dog")[j]} for j, b in enumerate(boxes)]
        return image | {"detection": {"instances": instances}}
    regions = [
        {"bbox": box, "phrase": " ".join(_CAPTION[b:e] for b, e in spans), "tokens_positive": spans}
        for box, spans in zip(_BOXES, _SPANS)
    ]
    return image | {"grounding": {"caption": _CAPTION, "regions": regions}}


def _write_odvg(rng: random.Random, folder: Path, world: Path) -> None:
    lines: list[Any] = [_line(k, rng) for k in range(3)]
    what = rng.choice(["value", "value", "value", "caption", "spans", "bytes", "text", "map"])
    changed = rng.randrange(3)
    grounding = lines[changed].get("grounding")
    if what == "caption" and grounding:
        grounding["caption"] = rng.choice(_ODD_CAPTIONS)
    elif what == "spans" and grounding:
        rng.choice(grounding["regions"])["tokens_positive"] = rng.choice(_ODD_SPANS)
    elif what in ("value", "caption", "spans"):
        lines[changed] = mutate_value(lines[changed], rng, VALUES)
    texts = [json.dumps(line) for line in lines]
    if what == "text":
        texts[changed] = rng.choice([mutate_json(lines[changed], rng).decode("utf-8", "replace"), *TEXTS])
    data = encoded("\n".join(texts), rng) if what == "bytes" else "\n".join(texts).encode("utf-8", "surrogatepass")
    write_data(folder, "train.jsonl", data)
    settings: dict[str, Any] = {"bad_boxes": rng.choice(["error", "error", "drop"])}
    if what == "map" or rng.random() < 0.2:
        names = {"0": "cat", "1": "dog"}
        write_data(folder, "map.json", mutate_json(names, rng, VALUES) if what == "map" else json.dumps(names))
        settings["label_map"] = "data/map.json"
    write_options(folder, source="train.jsonl", settings=settings, image_files=_IMAGES)


def _write_mdetr(rng: random.Random, folder: Path, world: Path) -> None:
    content = read_json(world / "instances.json")
    for image in content["images"]:
        image["caption"] = _CAPTION
    for annotation in content["annotations"]:
        del annotation["segmentation"]
        annotation["tokens_positive"] = rng.choice(_SPANS)
    if rng.random() < 0.3:
        rng.choice(content["images"])["caption"] = rng.choice(_ODD_CAPTIONS)
        data = json.dumps(content).encode()
    elif rng.random() < 0.3:
        rng.choice(content["annotations"])["tokens_positive"] = rng.choice(_ODD_SPANS)
        data = json.dumps(content).encode()
    else:
        data = mutate_json(content, rng, VALUES)
    write_data(folder, "mdetr.json", data)
    write_options(folder, source="mdetr.json", settings={"bad_boxes": "drop"}, image_files=_IMAGES)


def _write_flickr30k(rng: random.Random, folder: Path, world: Path) -> None:
    what = rng.choice(["xml", "sentences", "sentences", "list", "missing"])
    for k in range(3):
        objects = "".join(
            f"<object><name>{j + 1}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + 9}</xmax>"
            f"<ymax>{y + 9}</ymax></bndbox></object>"
            for j, (x, y) in enumerate(((3, 4), (21, 4)))
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
        text = f"<annotation><filename>{k}.jpg</filename>{size}{objects}<object><name>3</name></object></annotation>"
        is_changed = what == "xml" and k == 0
        write_data(
            folder, f"Annotations/{k}.xml", mutate_xml(ElementTree.fromstring(text), rng) if is_changed else text
        )
        text = "[/EN#1/people Two men] in [/EN#2/clothing/other red hats] wait at [/EN#3/scene a stop] .\nA man ."
        if what == "sentences" and k == 0:
            start = rng.randrange(len(text))
            odd = rng.choice(["[/EN#", "]", "[/EN#1/people ]", "[/EN#9/x y]", "[", "\n\n", " . ", *NAMES])
            text = rng.choice([text[:start] + odd + text[start:], text[:start] + text[start + 5 :]])
            write_data(folder, f"Sentences/{k}.txt", encoded(text, rng))
        else:
            write_data(folder, f"Sentences/{k}.txt", text)
    names = ["0", "1", "2"]
    if what == "list":
        names[rng.randrange(3)] = pick(rng, TEXTS, ("7", "0.jpg"))
    write_data(folder, "val.txt", encoded("\n".join(names), rng) if what == "list" else "\n".join(names))
    settings = {"split": rng.choice(["val", None, "test" if what == "missing" else "val"]), "bad_boxes": "drop"}
    write_options(folder, source="", settings=settings | {"format": "flickr30k"}, image_files=_IMAGES)


def _write_refcoco(rng: random.Random, folder: Path, world: Path) -> None:
    content = read_json(world / "instances.json")
    refs: Any = [
        {
            "ann_id": a["id"], "image_id": a["image_id"], "split": ("val", "testA")[a["id"] % 2],
            "sentences": [{"raw": "left cat"}, {"sent": "the cat. on the left?"}],
        }
        for a in content["annotations"]
    ]  # fmt: skip
    what = rng.choice(["value", "value", "bytes", "code", "json", "text"])
    if what == "value":
        refs = mutate_value(refs, rng, VALUES)
    elif what == "text":
        refs[0]["sentences"][0] = {"raw": rng.choice(_ODD_CAPTIONS)}
    data = pickle.dumps(copy.deepcopy(refs), protocol=rng.choice([0, 2, 4]))
    if what == "bytes":
        data = mutate_bytes(data, rng)
    elif what == "code":
        code = rng.choice(_PICKLED)
        data = rng.choice([code, data[:-1] + code])
    write_data(folder, "refs.p", data)
    write_data(folder, "instances.json", mutate_json(content, rng, VALUES) if what == "json" else json.dumps(content))
    settings = {"split": rng.choice(["val", "testA", None]), "bad_boxes": "drop"}
    write_options(folder, source="refs.p", settings=settings, image_files=_IMAGES)


def check(folder: Path, world: Path) -> None:
    """Check that samples are what the documentation says, that prompts can be made of them, and nothing is lost."""
    with guarded(folder, world) as options:
        dataset = GroundingDataset("data/images", f"data/{options['source']}", **options["settings"])
        samples = [dataset[k] for k in range(len(dataset))]
        num_boxes = 0
        for index, sample in enumerate(samples):
            target = sample["target"]
            phrases = target.get("phrases")
            num_boxes += len(target["labels"])
            check_boxes(
                target, len(dataset.classes if phrases is None else phrases) if phrases or dataset.classes else 0
            )
            if phrases is None:
                continue
            assert split_phrases(phrases) and len(dataset.located(index).regions) == len(target["labels"])
            for label, spans in zip(target["labels"].tolist(), target.get("phrase_spans", ())):
                assert spans and all(0 <= b < e <= len(phrases[label]) for b, e in spans), (spans, phrases[label])
        assert num_boxes == dataset.num_objects
        _check_count(folder / "data" / options["source"], num_boxes, **options["settings"])
        dataset.prompts = Prompts(max_tokens=2000)
        _check_prompts(dataset, samples)


def _check_count(path: Path, num_boxes: int, *, bad_boxes: str, **_: Any) -> None:
    if path.suffix != ".jsonl" or bad_boxes == "drop":
        return
    lines = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    expected = 0
    for line in lines:
        for entry in line.get("detection", {}).get("instances", ()) or line.get("grounding", {}).get("regions", ()):
            expected += len(entry["bbox"]) if isinstance(entry["bbox"][0], list) else 1
    if expected != num_boxes:
        raise LostError(f"{expected} boxes in the file, {num_boxes} read")


def _check_prompts(dataset: GroundingDataset, samples: list) -> None:
    """Check that every object has a token of its prompt."""
    step = PromptStep(dataset, training=True)
    prompted, prompt = step(samples, range(len(samples)))
    assert prompt.tokens.shape == prompt.phrase_ids.shape == prompt.is_word.shape
    for sample, phrase_ids, is_word in zip(prompted, prompt.phrase_ids, prompt.is_word):
        target = sample["target"]
        positive = target.get("positive_map")
        if positive is not None:
            assert positive.any(1).all() and is_word[: positive.shape[1]][positive.any(0)].all()
        assert len(target["labels"]) == 0 or int(target["labels"].max()) <= int(phrase_ids.max())


def _write_lvis(rng: random.Random, folder: Path, world: Path) -> None:
    content = read_json(world / "instances.json")
    for image in content["images"]:
        image |= {
            "neg_category_ids": rng.choice([[], [3], [7, 3]]),
            "not_exhaustive_category_ids": rng.choice([[], [7]]),
        }
        image["coco_url"] = f"http://images.cocodataset.org/images/{image.pop('file_name')}"
    for category in content["categories"]:
        category |= {"frequency": rng.choice("rcf"), "image_count": 3, "synonyms": [category["name"]]}
    for annotation in content["annotations"]:
        del annotation["iscrowd"]
    write_data(folder, "lvis.json", mutate_json(content, rng, VALUES) if rng.random() < 0.9 else json.dumps(content))
    write_options(folder, source="lvis.json", image_files=_IMAGES)


def check_lvis(folder: Path, world: Path) -> None:
    """Check that the classes of images are those of the file, and that objects evaluated as predictions score 1."""
    with guarded(folder, world), naming("lvis.json"):
        dataset = LvisDetection("data", "data/lvis.json", bad_boxes="drop")
        truth = dataset.ground_truth()
        for k in range(len(dataset)):
            check_boxes(dataset[k]["target"], len(dataset.classes))
        ids = set(dataset.category_ids)
        assert all(
            {*image["neg_category_ids"], *image["not_exhaustive_category_ids"]} <= ids for image in truth["images"]
        )
        evaluator = LvisEvaluator(dataset)
        evaluator.check_dataset()
        metrics = evaluator.compute()
        assert all(-1 <= value <= 1 for value in metrics.values())
    check_evaluation(dataset, truth, masks=False)


def _tokens() -> list[str]:
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", "a", "red", "cat", "##s", "dog"]


def _write_tokenizer(rng: random.Random, folder: Path, world: Path) -> None:
    tokens = _tokens()
    if rng.random() < 0.5:
        for _ in range(rng.choice([0, 1, 2])):
            k = rng.randrange(len(tokens))
            tokens[k : k + rng.choice([0, 1])] = [rng.choice([*TEXTS, "cat", "[PAD]", "##", "[CLS]"])]
        write_data(folder, "vocab.txt", encoded("\n".join(tokens), rng))
    else:
        from tokenizers import BertWordPieceTokenizer

        made = BertWordPieceTokenizer({token: number for number, token in enumerate(tokens)}, lowercase=True)
        write_data(folder, "tokenizer.json", mutate_json(json.loads(made.to_str()), rng, VALUES))
    write_options(folder, source=rng.choice(["data", "data/vocab.txt", "data/tokenizer.json", "data"]))


def check_tokenizer(folder: Path, world: Path) -> None:
    """Check that prompts are encoded by numbers of the file, or refused."""
    with guarded(folder, world) as options:
        vocabulary = find_tokenizer(options["source"])
        assert len(set(vocabulary.numbers)) == len(vocabulary.numbers)
        for text in ("a red cat . dogs .", "cats", "zzz . a", "a" * 300):
            phrases = split_phrases(text)
            try:
                prompt = encode_phrases(vocabulary, phrases)
            except VitkitError as error:
                assert "prompt:" in str(error), error
                continue
            assert len(prompt.tokens) == len(prompt.phrase_ids) == len(prompt.is_word)
            assert set(prompt.tokens) <= set(vocabulary.numbers)


FORMATS = [
    Format("odvg", _write_odvg, check, DataError, 6),
    Format("mdetr", _write_mdetr, check, DataError, 3),
    Format("flickr30k", _write_flickr30k, check, DataError, 3),
    Format("refcoco", _write_refcoco, check, DataError, 4),
    Format("lvis", _write_lvis, check_lvis, DataError, 5),
    Format("tokenizers", _write_tokenizer, check_tokenizer, CheckpointError, 4),
]
