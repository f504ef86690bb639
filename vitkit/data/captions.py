"""Images with captions: COCO's caption files, the synthetic world, and image features that were computed before."""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.coco_file import check_file_name, first_images, read_json, unique_ids
from vitkit.data.collate import collate
from vitkit.data.images import read_image, to_tensor
from vitkit.data.shapes_world import COLORS, GROUNDS, THINGS, Scene, World
from vitkit.data.text import pad_tokens
from vitkit.data.transforms import Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS, TRANSFORMS, Spec
from vitkit.structures import BOS, EOS, Batch
from vitkit.vocabulary import Vocabulary

logger = logging.getLogger("vitkit")

_NO_BOXES, _NO_LABELS = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
_NO_WORD = re.compile(r"[^\w\s'-]|_|(?<!\w)['-]|['-](?!\w)")


def caption_words(text: str) -> str:
    """What a captioner learns of a caption: its words in lower case, without punctuation between them."""
    return " ".join(_NO_WORD.sub(" ", text.lower().replace("’", "'")).split())


class CaptionDataset:
    """Images with one caption or more each. A subclass answers `image_ids`, `load_image`, `references`,
    `aspect_ratios`, `vocabulary_texts` and `images_key`.

    An epoch has every image once, with one of its captions, which the sample's seed draws: the batches have images that
    differ, and in five epochs each of five captions is seen once on average. Without a seed it is the first caption.

    A sample has `image` (3, H, W) uint8, or `features` (C, h, w) float32 and `features_key`, and as target
        tokens: (T,) int64, the caption's words and EOS,
        references: all captions as they stand in the data,
        image_id, image_size, original_size: see DetectionTarget.

    Args:
        transforms: a spec of TRANSFORMS or a built one; None leaves the images as they are.
        min_count: of a training dataset, whose words make the vocabulary: rarer ones are unknown. None takes another
            dataset's vocabulary (`use_vocabularies_of`).
        features: the file that `tools/cache_features.py` wrote for this dataset; no image is loaded then.
    """

    image_ids: Sequence[int]
    source_vocabulary = None

    def __init__(
        self, transforms: Spec | Transforms | None, *, min_count: int | None = None, features: str | None = None
    ):
        self.min_count = min_count
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        self.transforms_key = json.dumps(transforms, sort_keys=True, default=lambda built: type(built).__name__)
        """Names the transforms in files of features."""
        self.features = None if features is None else FeatureFile(features, self.images_key(), self.transforms_key)
        self._vocabulary: Vocabulary | None = None

    def load_image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, before any transform."""
        raise NotImplementedError

    def references(self, index: int) -> list[str]:
        """All captions of an image."""
        raise NotImplementedError

    def vocabulary_texts(self) -> Iterable[str]:
        """Of what the vocabulary is made."""
        raise NotImplementedError

    def images_key(self) -> str:
        """Names the images and their order in files of features."""
        raise NotImplementedError

    def aspect_ratios(self) -> np.ndarray:
        """Width / height of every image, float64 (len(self),)."""
        raise NotImplementedError

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The words of this dataset's captions, or what `use_vocabularies_of` took over.

        Raises:
            DataError: there is none, because this dataset is not trained on.
        """
        if self._vocabulary is None:
            if self.min_count is None:
                raise DataError(
                    "the dataset has no vocabulary: it takes its training dataset's or a checkpoint's. Call "
                    "use_vocabularies_of(training_dataset), or give it min_count=1 to make one from its captions."
                )
            texts = map(caption_words, self.vocabulary_texts())
            self._vocabulary = Vocabulary.train("word", texts, min_count=self.min_count, lowercase=True)
        return self._vocabulary

    @target_vocabulary.setter
    def target_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def use_vocabularies_of(self, other: "CaptionDataset") -> None:
        """What is evaluated has the words that were trained."""
        self._vocabulary = other.target_vocabulary

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """One image with a caption.

        Args:
            index: position in the dataset; or (position, seed), and transforms and caption are drawn from that seed.
        Raises:
            DataError: the image cannot be read.
        """
        index, seed = index if isinstance(index, tuple) else (index, None)
        index = range(len(self))[index]
        references = self.references(index)
        # A stream of its own: else the caption would come with certain crops.
        chosen = 0 if seed is None else int(np.random.default_rng((seed, 1)).integers(len(references)))
        tokens = self.target_vocabulary.encode(caption_words(references[chosen]))
        target = {
            "tokens": torch.tensor([*tokens, EOS]),
            "references": references,
            "image_id": int(self.image_ids[index]),
        }
        if self.features is not None:
            return {"features": self.features[index], "features_key": self.features.weights_key, "target": target}
        image = self.load_image(index)
        original_size = image.shape[:2]
        if self.transforms is not None:
            image = self.transforms(image, _NO_BOXES, _NO_LABELS, None, seed=seed).image
        target |= {"image_size": image.shape[:2], "original_size": original_size}
        return {"image": to_tensor(image), "target": target}

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]], *, size_divisor: int = 1) -> Batch:
        """`inputs` are images and padding_mask, or features (B, C, h, w) and features_key; and target_in (B, T) int64,
        BOS and the captions, padded by PAD."""
        if "features" in samples[0]:
            features = torch.stack([sample["features"] for sample in samples])
            key = torch.tensor(samples[0]["features_key"])
            batch = Batch({"features": features, "features_key": key}, [sample["target"] for sample in samples])
        else:
            batch = collate(samples, size_divisor=size_divisor)
        begin = torch.tensor([BOS])
        batch.inputs["target_in"] = pad_tokens([torch.cat([begin, target["tokens"][:-1]]) for target in batch.targets])
        return batch


@DATASETS.register
class CocoCaptions(CaptionDataset):
    """Images in a folder with a caption file in COCO's format (Chen et al. 2015, https://arxiv.org/abs/1504.00325).

    Captions without a word and images without a caption are left out and counted.

    Args:
        images: folder with the pictures.
        annotations: the JSON file.
        transforms, min_count, features: see `CaptionDataset`. The paper keeps words that occur five times.
        missing_images: what to do where a listed picture is not in the folder: "error", or "drop" to leave it out and
            count it.
        first: only as many of the file's images, in its order, such as to see that a model can learn them by heart.
    Raises:
        ConfigError: first is below 1, or missing_images unknown.
        DataError: a folder or file is missing, or the file is wrong.
    """

    def __init__(
        self,
        images: str,
        annotations: str,
        *,
        transforms: Spec | Transforms | None = None,
        min_count: int | None = None,
        missing_images: str = "error",
        first: int | None = None,
        features: str | None = None,
    ):
        if missing_images not in ("error", "drop"):
            raise ConfigError(f"missing_images: got {missing_images!r}; expected 'error' or 'drop'.")
        self.folder = Path(images)
        if not self.folder.is_dir():
            raise DataError(
                f"images: no folder '{images}'. Download the dataset (see README, \"Data\"), "
                "or correct data.root or the `images` of this dataset."
            )
        path = Path(annotations)
        entries, captions = read_caption_file(path)
        entries = first_images({"images": entries, "annotations": []}, first)["images"]
        kept = [entry for entry in entries if captions[entry["id"]]]
        if not kept:
            raise DataError(f"{path.name}: none of the first {first} images in '{path}' has a caption.")
        found = [entry for entry in kept if (self.folder / entry["file_name"]).is_file()]
        if len(found) < len(kept) and (missing_images == "error" or not found):
            lost = next(entry for entry in kept if not (self.folder / entry["file_name"]).is_file())
            raise DataError(
                f"images: '{path}' lists '{lost['file_name']}', which is not in '{images}' ({len(kept) - len(found)} "
                f"of {len(kept)} images are missing). Give the folder that belongs to these captions, or leave "
                "missing images out by missing_images='drop'."
            )
        num_captions = sum(len(captions[entry["id"]]) for entry in found)
        logger.info(f"{path.name}: {len(found)} images, {num_captions} captions")
        for number, what in ((len(entries) - len(kept), "a caption"), (len(kept) - len(found), "a picture")):
            if number:
                logger.warning("%s: %d of %d images are left out: without %s", path.name, number, len(entries), what)
        self.image_ids = np.array([entry["id"] for entry in found], np.int64)
        self._file_names = np.array([entry["file_name"] for entry in found])
        self._ratios = np.array([_aspect_ratio(entry) for entry in found])
        self._captions = _Texts([captions[entry["id"]] for entry in found])
        super().__init__(transforms, min_count=min_count, features=features)

    def load_image(self, index: int) -> np.ndarray:
        return read_image(self.folder / str(self._file_names[index]))

    def references(self, index: int) -> list[str]:
        return self._captions[index]

    def images_key(self) -> str:
        listed = "\n".join(f"{image_id} {name}" for image_id, name in zip(self.image_ids, self._file_names))
        return f"{len(self)} images {hashlib.sha256(listed.encode(errors='surrogatepass')).hexdigest()[:16]}"

    def vocabulary_texts(self) -> Iterable[str]:
        return (text for index in range(len(self)) for text in self.references(index))

    def aspect_ratios(self) -> np.ndarray:
        return self._ratios


def _aspect_ratio(entry: Mapping[str, Any]) -> float:
    """Of an entry of `images`; 1 where it does not tell, since it serves to group images alone."""
    width, height = entry.get("width"), entry.get("height")
    known = all(isinstance(side, int | float) and 0 < side < 2**31 for side in (width, height))
    return width / height if known else 1.0


class _Texts:
    """Lists of texts in one block of bytes, which forked workers share."""

    def __init__(self, texts: Sequence[Sequence[str]]):
        blobs = [json.dumps(list(of_one)).encode() for of_one in texts]
        self._bytes = b"".join(blobs)
        self._offsets = np.cumsum([0, *map(len, blobs)])

    def __getitem__(self, index: int) -> list[str]:
        start, stop = self._offsets[index : index + 2]
        return json.loads(self._bytes[start:stop])


def read_caption_file(path: Path) -> tuple[list[dict], dict[int, list[str]]]:
    """The images of a COCO caption file, and the captions of each by its id, in the file's order.

    Captions without a word are left out and counted in a warning.

    Raises:
        DataError: no such file, not JSON, a missing part or key, an id twice or unknown, no caption.
    """
    content = read_json(path)
    for part, keys in (("images", ("id", "file_name")), ("annotations", ("image_id", "caption"))):
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not entries:
            raise DataError(
                f"{path.name}: no list {part!r}, or an empty one, at the top level of '{path}'. Expected a COCO "
                "caption file: {'images': [...], 'annotations': [...]}."
            )
        for position, entry in enumerate(entries):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise DataError(
                    f"{path.name}: entry {position} of '{part}' has no {missing[0]!r}: got {str(entry)[:100]}."
                )
    unique_ids(content["images"], "image", path.name)
    for image in content["images"]:
        check_file_name(image, f"{path.name}: image {image['id']}")
    captions: dict[int, list[str]] = {image["id"]: [] for image in content["images"]}
    num_empty = 0
    for annotation in content["annotations"]:
        image_id, caption = annotation["image_id"], annotation["caption"]
        if not isinstance(image_id, int) or image_id not in captions:
            raise DataError(
                f"{path.name}: annotation {annotation.get('id')} has image_id {image_id!r}, which is not among the "
                f"{len(captions)} ids in 'images'. Remove the annotation or add the image."
            )
        if not isinstance(caption, str):
            raise DataError(f"{path.name}: annotation {annotation.get('id')} has caption {caption!r}; expected text.")
        if caption_words(caption):
            captions[image_id].append(caption.strip())
        else:
            num_empty += 1
    if num_empty:
        logger.warning(
            "%s: %d of %d captions are left out: they have no word", path.name, num_empty, len(content["annotations"])
        )
    if not any(captions.values()):
        raise DataError(f"{path.name}: no caption in '{path}' has a word.")
    return content["images"], captions


@DATASETS.register
class ShapesCaptions(CaptionDataset):
    """The synthetic world with a caption for each image: its things from left to right, and the ground.

    Mirrored images would contradict their captions: no transform may flip.

    Args:
        num_images: how many.
        image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        transforms, features: see `CaptionDataset`.
    Raises:
        ConfigError: a number is out of range or the split is unknown.
    """

    def __init__(
        self,
        num_images: int,
        *,
        image_size: int = 64,
        min_objects: int = 1,
        max_objects: int = 2,
        min_size: float = 0.25,
        max_size: float = 0.5,
        seed: int = 0,
        split: str = "train",
        transforms: Spec | Transforms | None = None,
        features: str | None = None,
    ):
        if num_images < 1:
            raise ConfigError(f"num_images: got {num_images}, expected at least 1.")
        self.world = World(
            image_size=image_size,
            min_objects=min_objects,
            max_objects=max_objects,
            min_size=min_size,
            max_size=max_size,
            seed=seed,
            split=split,
        )
        self.image_ids = range(1, num_images + 1)
        super().__init__(transforms, min_count=1, features=features)

    def scene(self, index: int) -> Scene:
        return self.world.scene(range(len(self))[index])

    def load_image(self, index: int) -> np.ndarray:
        return self.scene(index).image

    def references(self, index: int) -> list[str]:
        return [self.scene(index).caption]

    def vocabulary_texts(self) -> Iterable[str]:
        """Every word a caption can have, so that no scene needs to be drawn."""
        return ["a an left of above below on ground", *THINGS, *COLORS, *GROUNDS]

    def images_key(self) -> str:
        return f"{len(self)} images of {self.world}"

    def aspect_ratios(self) -> np.ndarray:
        return np.ones(len(self))


class FeatureFile:
    """Features of every image of a dataset, as `write_features` stored them: NAME.npy, and NAME.json that says whose.

    Args:
        path: of NAME.npy.
        images_key, transforms_key: of the dataset.
    Raises:
        DataError: there is no such file, or it is of other images or transforms.
    """

    def __init__(self, path: str | Path, images_key: str, transforms_key: str):
        self.path = Path(path)
        about = self.path.with_suffix(".json")
        if not self.path.is_file() or not about.is_file():
            raise DataError(
                f"features: no file '{self.path}' with '{about.name}' beside it. Write them by tools/"
                "cache_features.py, or leave `features` out of this dataset, and they are computed from the images."
            )
        described = read_json(about)
        if described.get("images") != images_key:
            raise DataError(
                f"features: '{self.path}' is of {described.get('images')}; this dataset has {images_key}. Is it "
                "another dataset's file? Else write it anew by tools/cache_features.py."
            )
        if described.get("transforms") != transforms_key:
            raise DataError(
                f"features: '{self.path}' was computed with the transforms {described.get('transforms')}; this dataset "
                f"has {transforms_key}. Write it anew by tools/cache_features.py."
            )
        self.weights_key: int = described["weights_key"]
        """Of the network that computed them; a captioner compares it with its own."""

    @cached_property
    def array(self) -> np.ndarray:
        """(N, C, h, w) float32, read from the disk where it is looked at."""
        return np.load(self.path, mmap_mode="r", allow_pickle=False)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self.array[index]))


def write_features(
    path: str | Path, maps: Iterable[Tensor], dataset: CaptionDataset, *, weights_key: int
) -> Mapping[str, Any]:
    """Stores the features of all images of a dataset, batch by batch, for `FeatureFile`.

    Args:
        path: of NAME.npy; NAME.json comes last, so that an unfinished file is never taken for a whole one.
        maps: (B, C, h, w) float32 each, the images in order.
        weights_key: see `FeatureFile`.
    Returns:
        what NAME.json says.
    Raises:
        DataError: the maps differ in size.
    """
    path, about, array, row = Path(path), Path(path).with_suffix(".json"), None, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    about.unlink(missing_ok=True)
    for batch in maps:
        if array is None:
            shape = (len(dataset), *batch.shape[1:])
            array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        if batch.shape[1:] != array.shape[1:]:
            raise DataError(
                f"features: image {dataset.image_ids[row]} has a map of {tuple(batch.shape[1:])}, others of "
                f"{array.shape[1:]}. Features need images of one size: set `transforms` to "
                "ClassificationEvalTransforms."
            )
        array[row : row + len(batch)] = batch.cpu().numpy()
        row += len(batch)
    assert row == len(dataset)
    array.flush()
    described = {
        "images": dataset.images_key(),
        "transforms": dataset.transforms_key,
        "weights_key": weights_key,
        "shape": list(array.shape),
    }
    about.write_text(json.dumps(described), encoding="utf-8")
    return described
