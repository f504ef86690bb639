"""Metrics of captioning, against all references of each image."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vitkit.distributed import gather_objects, is_main
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.caption_metrics import bleu, cider_d, exact_stem_f, rouge_l, tokenize_caption
from vitkit.registry import EVALUATORS

logger = logging.getLogger("vitkit")


class CaptionedDataset(Protocol):
    """What the evaluator asks of a dataset."""

    image_ids: Sequence[int]

    def references(self, index: int) -> Sequence[str]: ...


@EVALUATORS.register
class CaptionEvaluator:
    """BLEU-1 to BLEU-4, ROUGE-L, CIDEr-D, and a stand-in for METEOR; see `vitkit.evaluation.caption_metrics`.

    Every image of the dataset counts, with all its references: one without a prediction has an empty caption. CIDEr-D
    is as the COCO evaluation reports it, up to 10 and about 1.0 for good models; all others are in 0..1. "exact_match"
    is the part of the captions that equal a reference, word for word.

    "exact_stem_F" stands where METEOR would need Java, WordNet and its tables: METEOR's formula on exact and stem
    matches alone. Its numbers are lower than METEOR's and do not compare with published ones.

    Args:
        dataset: the evaluated dataset.
    """

    per_class_metric = "CIDEr-D"
    """What `per_class` gives."""

    def __init__(self, dataset: CaptionedDataset):
        if not hasattr(dataset, "references"):
            raise ConfigError(
                f"evaluator CaptionEvaluator: {type(dataset).__name__} has no captions. Set data.val to a dataset of "
                "captions, such as CocoCaptions or ShapesCaptions."
            )
        self.dataset = dataset
        self._known = set(dataset.image_ids)
        self._captions: dict[int, str] = {}
        self._metrics: dict[str, float] = {}
        self._cider: list[float] = []

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Takes one batch; an image that was seen before is left out.

        Args:
            predictions: `text` of each image.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            ConfigError: the model writes no text.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            if "text" not in prediction:
                raise ConfigError(
                    f"evaluator CaptionEvaluator: predictions have {', '.join(prediction)} and no 'text'. It is for "
                    "models that write captions, with their vocabulary."
                )
            self._captions.setdefault(target["image_id"], prediction["text"])

    def gather(self) -> None:
        """Moves the captions of all ranks to the main process; an image that several ranks saw is kept once."""
        merged: dict[int, str] = {}
        for captions in gather_objects(self._captions):
            merged = captions | merged
        if is_main():
            self._captions = merged

    def compute(self) -> dict[str, float]:
        """The metrics on the main process; an empty dict elsewhere."""
        if not is_main():
            return {}
        ids = list(self.dataset.image_ids)
        missing = len(ids) - len(self._captions)
        if missing:
            logger.warning("%d of %d images have no caption, which counts as an empty one", missing, len(ids))
        candidates = [tokenize_caption(self._captions.get(image_id, "")) for image_id in ids]
        references = [
            [tokenize_caption(text) for text in self.dataset.references(position)] for position in range(len(ids))
        ]
        self._cider = cider_d(candidates, references)
        exact = [candidate in its_references for candidate, its_references in zip(candidates, references)]
        self._metrics = {
            **{f"BLEU-{n}": value for n, value in enumerate(bleu(candidates, references), start=1)},
            "ROUGE-L": _mean(rouge_l(candidates, references)),
            "CIDEr-D": _mean(self._cider),
            "exact_stem_F": _mean(exact_stem_f(candidates, references)),
            "exact_match": _mean(exact),
        }
        return dict(self._metrics)

    def table(self) -> str:
        """The metrics of the last `compute()`; empty on other processes."""
        if not self._metrics:
            return ""
        percent = {name: f"{100 * value:.1f} %" for name, value in self._metrics.items()}
        percent["CIDEr-D"] = f"{self._metrics['CIDEr-D']:.3f}"
        width = max(map(len, percent))
        lines = [f"{name:<{width}} {value:>8}" for name, value in percent.items()]
        num_references = sum(len(self.dataset.references(i)) for i in range(len(self.dataset.image_ids)))
        lines.append(
            f"{len(self.dataset.image_ids)} images, {num_references} references; CIDEr-D on COCO's scale (up to 10); "
            "exact_stem_F is METEOR's formula without synonyms and paraphrases"
        )
        return "\n".join(lines)

    def per_class(self) -> dict[str, float]:
        """Captions have no classes; image id -> CIDEr-D of the last `compute()` in their place."""
        return {str(image_id): score for image_id, score in zip(self.dataset.image_ids, self._cider)}

    def write_results(self, path: str | Path) -> list[Path]:
        """Writes the captions in COCO's results format, a list of image_id and caption, which other tools score too.

        Returns:
            the file.
        """
        path = Path(path)
        results = [
            {"image_id": image_id, "caption": self._captions[image_id]}
            for image_id in self.dataset.image_ids
            if image_id in self._captions
        ]
        path.write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")
        return [path]

    def load_results(self, path: str | Path) -> None:
        """Takes captions that were written before, in place of `update`.

        Raises:
            DataError: no such file, not in that format, an unknown image, or one that is there twice.
        """
        path = Path(path)
        for position, entry in enumerate(_read_results(path)):
            if not isinstance(entry, dict) or not isinstance(entry.get("caption"), str) or "image_id" not in entry:
                raise DataError(
                    f"results '{path}': entry {position} is {str(entry)[:100]}; expected "
                    '{"image_id": number, "caption": text}.'
                )
            image_id = entry["image_id"]
            if not isinstance(image_id, int) or image_id not in self._known:
                raise DataError(
                    f"results '{path}': entry {position} has image_id {image_id!r}, which is not among the "
                    f"{len(self._known)} images of the dataset. Are they the captions of another dataset?"
                )
            if image_id in self._captions:
                raise DataError(
                    f"results '{path}': image {image_id} is there twice; expected one caption for each image."
                )
            self._captions[image_id] = entry["caption"]


def _read_results(path: Path) -> list:
    if not path.is_file():
        raise DataError(f"results: no file '{path}'. Give the file that tools/test.py wrote.")
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"results '{path}': not valid JSON ({error}).") from error
    if not isinstance(entries, list) or not entries:
        raise DataError(f"results '{path}': expected a list of captions that is not empty.")
    return entries


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
