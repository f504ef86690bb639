"""Images with captions, from COCO's caption files and Karpathy's splits of them."""

import csv
import hashlib
import json
import logging
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.datasets.base import BaseImageDataset, require_folders
from vitkit.data.datasets.coco_file import first_images
from vitkit.data.datasets.image_features import FeatureFile
from vitkit.data.formats.exporters import find_listed_files, read_exporters_fields
from vitkit.data.text.datasets import decoder_inputs
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.io.coco_schema import caption_issues, raise_issues
from vitkit.io.folders import IMAGE_SUFFIXES
from vitkit.io.image_files import ImageStore, check_inside, to_tensor
from vitkit.io.json_files import read_json
from vitkit.io.shared_memory import join_texts, text_at
from vitkit.io.text_files import read_lines
from vitkit.registry import DATASETS, Spec
from vitkit.structures import EOS, Batch
from vitkit.text.vocabulary import Vocabulary
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")

_TOKENS = re.compile(r"\S.*\.\w+#\d+\t")
_COLUMNS = (("image", "image_name", "filename", "file_name"), ("caption", "comment", "text"))
_KARPATHY_SPLITS = {"restval": "train"}
_PUNCTUATION = re.compile(r"[^\w\s'-]|_|(?<!\w)['-]|['-](?!\w)")


def caption_words(text: str) -> str:
    """Normalize a caption for training: its words in lower case, without the punctuation between them."""
    return " ".join(_PUNCTUATION.sub(" ", text.lower().replace("’", "'")).split())


class CaptionDataset(BaseImageDataset):
    """Base of datasets of images that have one or more captions each.

    A subclass also implements `references`, `vocabulary_texts` and `images_key`.

    An epoch has every image once, with one caption drawn by the sample's seed, so that all images of a batch differ; in
    five epochs each of five captions is seen once on average. Without a seed the first caption is taken.

    A sample has `image` (3, H, W) uint8, or `features` (C, h, w) float32 and `features_key`, and a target with
        tokens: (T,) int64, the caption's words and EOS,
        references: all captions as they are in the data,
        image_id, image_size, original_size: see DetectionTarget.

    Args:
        transforms: see `BaseImageDataset`.
        min_count: the vocabulary has the words that occur at least this often in this training dataset. None means that
            another dataset's vocabulary is used (`use_vocabularies_of`).
        features: file that `data.cache_features` wrote for this dataset, read in place of the images.
    """

    annotations = ("captions",)
    has_vocabularies = True

    def __init__(
        self, transforms: Spec | Transforms | None, *, min_count: int | None = None, features: str | Path | None = None
    ):
        super().__init__(transforms)
        self.min_count = min_count
        self.transforms_key = json.dumps(transforms, sort_keys=True, default=lambda built: type(built).__name__)
        """Identifies the transforms in feature files."""
        self.features = None if features is None else FeatureFile(features, self.images_key(), self.transforms_key)
        self._vocabulary: Vocabulary | None = None

    def references(self, index: int) -> list[str]:
        """Return all captions of an image."""
        raise NotImplementedError

    def vocabulary_texts(self) -> Iterable[str]:
        """Return the texts that the vocabulary is built from."""
        raise NotImplementedError

    def images_key(self) -> str:
        """Return a string that identifies the images and their order in feature files."""
        raise NotImplementedError

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The words of this dataset's captions, or the vocabulary set by `use_vocabularies_of`.

        Raises:
            DataError: no vocabulary was set, and this is not a training dataset.
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
        """Set the vocabulary of the captions."""
        self._vocabulary = vocabulary

    def use_vocabularies_of(self, other: "CaptionDataset") -> None:
        self._vocabulary = other.target_vocabulary

    def load_sample(self, index: int, seed: int | None) -> dict[str, Any]:
        """Load an image with a caption; see `BaseImageDataset`."""
        references = self.references(index)
        # The choice has a random stream of its own: otherwise each caption would always come with the same crops.
        choice = 0 if seed is None else int(np.random.default_rng((seed, 1)).integers(len(references)))
        tokens = self.target_vocabulary.encode(caption_words(references[choice]))
        target = {
            "tokens": torch.tensor([*tokens, EOS]),
            "references": references,
            "image_id": int(self.image_ids[index]),
        }
        if self.features is not None:
            return {"features": self.features[index], "features_key": self.features.weights_key, "target": target}
        original = self.load_image(index)
        image = self.transform(AnnotatedImage(original), seed).image
        target |= {"image_size": image.shape[:2], "original_size": original.shape[:2]}
        return {"image": to_tensor(image), "target": target}

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> Batch:
        """Collate samples into a batch.

        `inputs` holds images and padding_mask, or features (B, C, h, w) and features_key; and target_in (B, T) int64,
        which is BOS followed by the caption, padded with PAD.
        """
        if "features" in samples[0]:
            features = torch.stack([sample["features"] for sample in samples])
            key = torch.tensor(samples[0]["features_key"])
            batch = Batch({"features": features, "features_key": key}, [sample["target"] for sample in samples])
        else:
            batch = Batch.collate(samples)
        batch.inputs["target_in"] = decoder_inputs(batch.targets)
        return batch


@DATASETS.register
class CocoCaptions(CaptionDataset):
    """Images in a folder with a caption file in COCO's format (Chen et al. 2015, https://arxiv.org/abs/1504.00325).

    Karpathy's dataset.json of Flickr8k, Flickr30k or COCO (Karpathy & Fei-Fei 2015, https://arxiv.org/abs/1412.2306),
    which has the splits as well, is also read, and text: a table of the columns image and caption, separated by "," or
    "|", or lines of FILE#NUMBER, a tab and a caption (captions.txt and Flickr8k.token.txt of Flickr8k).

    Captions without a word and images without a caption are skipped and counted.

    Args:
        images: folder of the images.
        annotations: the JSON or text file.
        split: "train", "val" or "test" for Karpathy's file, whose "restval" belongs to "train".
        transforms, min_count, features: see `CaptionDataset`. The paper keeps words that occur five times.
        missing_images: what to do if a listed image is not in the folder: "error", or "drop" to skip and count it.
        first: use only the first `first` images of the file, for instance to check that a model can overfit them.
        allow_outside: also read files that lie outside the folder, by an absolute `file_name` or one with "..".
    Raises:
        ConfigError: first is below 1, or missing_images unknown.
        DataError: a folder or file is missing, or the file is invalid.
    """

    file_kind = "captions"

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        *,
        transforms: Spec | Transforms | None = None,
        split: str | None = None,
        min_count: int | None = None,
        missing_images: str = "error",
        first: int | None = None,
        features: str | Path | None = None,
        allow_outside: bool = False,
    ):
        if missing_images not in ("error", "drop"):
            raise ConfigError(f"missing_images: got {missing_images!r}; expected 'error' or 'drop'.")
        require_folders(images=images)
        self.store = ImageStore(images)
        self.annotation_file = path = Path(annotations)
        entries, captions = read_caption_file(path, split, images=self.store.folder)
        entries = first_images(entries, first)
        check_inside(images, (entry["file_name"] for entry in entries), path.name, allow_outside=allow_outside)
        captioned = [entry for entry in entries if captions[entry["id"]]]
        if not captioned:
            raise DataError(f"{path.name}: none of the first {first} images in '{path}' has a caption.")
        usable = [entry for entry in captioned if self.store.has(entry["file_name"])]
        num_missing = len(captioned) - len(usable)
        if num_missing and (missing_images == "error" or not usable):
            missing = next(entry for entry in captioned if not self.store.has(entry["file_name"]))
            raise DataError(
                f"images: '{path}' lists '{missing['file_name']}', which is not in '{images}' ({num_missing} "
                f"of {len(captioned)} images are missing). Give the folder that belongs to these captions, or leave "
                "out missing images with missing_images='drop'."
            )
        num_captions = sum(len(captions[entry["id"]]) for entry in usable)
        logger.info(f"{path.name}: {pluralize(len(usable), 'images')}, {pluralize(num_captions, 'captions')}")
        for number, part in ((len(entries) - len(captioned), "a caption"), (num_missing, "an image")):
            if number:
                logger.warning("%s: %d of %d images are left out: without %s", path.name, number, len(entries), part)
        self.image_ids = np.array([entry["id"] for entry in usable], np.int64)
        self._file_names, self._name_offsets = join_texts(entry["file_name"] for entry in usable)
        self._aspect_ratios = np.array([_aspect_ratio(entry) for entry in usable])
        self._captions, self._caption_offsets = join_texts(json.dumps(captions[entry["id"]]) for entry in usable)
        super().__init__(transforms, min_count=min_count, features=features)

    def file_name(self, index: int) -> str:
        return text_at(self._file_names, self._name_offsets, index)

    def references(self, index: int) -> list[str]:
        return json.loads(text_at(self._captions, self._caption_offsets, index))

    def images_key(self) -> str:
        listed = "\n".join(f"{image_id} {self.file_name(k)}" for k, image_id in enumerate(self.image_ids))
        return f"{len(self)} images {hashlib.sha256(listed.encode(errors='surrogatepass')).hexdigest()[:16]}"

    def vocabulary_texts(self) -> Iterable[str]:
        """Return all captions."""
        return (text for index in range(len(self)) for text in self.references(index))

    def aspect_ratios(self) -> np.ndarray:
        """Return width / height of each image; 1 for images whose size the file does not state."""
        return self._aspect_ratios


def _is_karpathy(content: Any) -> bool:
    images = content.get("images") if isinstance(content, dict) else None
    is_list = isinstance(images, list) and bool(images) and isinstance(images[0], dict)
    return is_list and "annotations" not in content and "sentences" in images[0]


def _read_karpathy(content: Mapping[str, Any], split: str | None, path: Path, folder: Path | None) -> dict[str, Any]:
    """Return a split of Karpathy's file in COCO's format."""
    images = content["images"]
    for number, image in enumerate(images):
        sentences = image.get("sentences") if isinstance(image, dict) else None
        is_list = isinstance(sentences, list) and all(isinstance(s, dict) and "raw" in s for s in sentences)
        if not is_list or not isinstance(image.get("filename"), str) or not isinstance(image.get("split"), str):
            raise DataError(
                f"{path.name}: image {number} is {reprlib.repr(image)}; expected an object with filename, split and "
                "sentences, each with raw. Download the file again."
            )
    counts = Counter(_KARPATHY_SPLITS.get(image["split"], image["split"]) for image in images)
    if split not in counts:
        options = ", ".join(f"{name} ({pluralize(count, 'images')})" for name, count in counts.items())
        raise DataError(f"{path.name}: split is {split!r}; it has {options}. Set `split` to one of them.")
    chosen = [image for image in images if _KARPATHY_SPLITS.get(image["split"], image["split"]) == split]
    ids = [image.get("cocoid", image.get("imgid", number)) for number, image in enumerate(chosen)]
    # COCO's images are in folders; whoever downloads the others has them in one.
    first = Path(str(chosen[0].get("filepath", "")), chosen[0]["filename"])
    in_folders = folder is not None and ImageStore(folder).has(first)
    folders = [f"{image['filepath']}/" if in_folders and image.get("filepath") else "" for image in chosen]
    return {
        "images": [
            {"id": id_, "file_name": prefix + image["filename"]} for id_, prefix, image in zip(ids, folders, chosen)
        ],
        "annotations": [
            {"image_id": id_, "caption": sentence["raw"]}
            for id_, image in zip(ids, chosen)
            for sentence in image["sentences"]
        ],
    }


def _read_text(path: Path) -> dict[str, Any]:
    """Return the lines of a text file, which are those of one image and caption each, in COCO's format."""
    lines = read_lines(path, "annotations", remedy="Give a file of captions.")
    if lines and _TOKENS.match(lines[0][1]):
        rows = [(number, [part.strip() for part in re.split(r"#\d+\t", line, maxsplit=1)]) for number, line in lines]
    else:
        rows = list(_table_rows(lines, path.name))
    ids: dict[str, int] = {}
    for number, row in rows:
        if len(row) != 2:
            raise DataError(
                f"{path.name} line {number}: expected an image and a caption, as in the first line. Correct it."
            )
        ids.setdefault(row[0], len(ids) + 1)
    return {
        "images": [{"id": number, "file_name": name} for name, number in ids.items()],
        "annotations": [{"image_id": ids[name], "caption": caption} for _, (name, caption) in rows],
    }


def _table_rows(lines: list[tuple[int, str]], file: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line of each row of a table, and its image and caption: in the last column, a
    caption may have the delimiter, and quotes are only read where that is a comma."""
    (_, first), *lines = lines or [(1, "")]
    head = [name.strip().lower() for name in re.split(r"[,|]", first)]
    columns = [next((k for k, name in enumerate(head) if name in names), None) for names in _COLUMNS]
    if None in columns:
        raise DataError(
            f"{file}: begins with {first!r:.100}; expected image,caption, or lines of FILE#NUMBER, a tab and a "
            "caption, or JSON in COCO's format. Convert it."
        )
    delimiter, quoting = ("|", csv.QUOTE_NONE) if "|" in first else (",", csv.QUOTE_MINIMAL)
    reader = csv.reader((f"{line}\n" for _, line in lines), delimiter=delimiter, quoting=quoting, strict=True)
    while (begin := reader.line_num) < len(lines):
        try:
            row = next(reader)
            later = [part for _, line in lines[begin + 1 : reader.line_num] for part in line.split(delimiter)]
            if any(Path(part).suffix.lower() in IMAGE_SUFFIXES for part in later):
                raise csv.Error("quotes enclose a line with another image")
        except csv.Error as error:
            raise DataError(
                f"{file} line {lines[begin][0]}: {error}. Close the quotes, and double those that are in the caption."
            ) from error
        if len(row) > len(head):
            row = [*row[: columns[1]], delimiter.join(row[columns[1] :])] if columns[1] == len(head) - 1 else []
        yield lines[begin][0], [row[k].strip().replace("\n", " ") for k in columns if k < len(row)]


def _aspect_ratio(entry: Mapping[str, Any]) -> float:
    """Return width / height of an entry of `images`, or 1 if it has no size; this only serves to group images."""
    width, height = entry.get("width"), entry.get("height")
    return width / height if width and height else 1.0


def read_caption_file(
    path: Path, split: str | None = None, *, images: Path | None = None
) -> tuple[list[dict], dict[int, list[str]]]:
    """Read the images of a caption file, and the captions of each image by its id, in the file's order.

    Captions without a word are skipped and counted in a warning.

    Args:
        split: the split to read of Karpathy's file.
        images: folder of the images.
    Raises:
        DataError: no such file, not JSON, its content is invalid, or no caption has a word.
        ConfigError: COCO's files have no splits.
    """
    content = read_json(path) if path.suffix.lower() == ".json" else _read_text(path)
    if _is_karpathy(content):
        content = _read_karpathy(content, split, path, images)
    elif split is not None:
        raise ConfigError(f"split: '{path}' is text or in COCO's format, which has no splits. Leave it out.")
    read_exporters_fields(content)
    if images is not None:
        find_listed_files(content, images)
    raise_issues(caption_issues(content), path.name)
    captions: dict[int, list[str]] = {image["id"]: [] for image in content["images"]}
    annotations = content["annotations"]
    worded = [annotation for annotation in annotations if caption_words(annotation["caption"])]
    for annotation in worded:
        captions[annotation["image_id"]].append(annotation["caption"].strip())
    if num_empty := len(annotations) - len(worded):
        logger.warning(f"{path.name}: {num_empty} of {len(annotations)} captions are left out: they have no word")
    if not any(captions.values()):
        raise DataError(f"{path.name}: no caption in '{path}' has a word.")
    return content["images"], captions
