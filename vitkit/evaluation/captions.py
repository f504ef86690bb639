"""Captioning metrics, against all references of each image."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.errors import ConfigError
from vitkit.evaluation.base import SampleEvaluator, read_results, require_annotations
from vitkit.evaluation.caption_metrics import bleu_counts, cider_d, rouge_l, tokenize_caption
from vitkit.evaluation.sample_statistics import CaptionStatistics
from vitkit.io.coco_schema import caption_result_issues, raise_issues
from vitkit.io.output import write_text
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS

logger = logging.getLogger("vitkit")


@EVALUATORS.register
class CaptionEvaluator(SampleEvaluator):
    """BLEU-1 to BLEU-4, ROUGE-L and CIDEr-D; see `vitkit.evaluation.caption_metrics`.

    Every image of the dataset counts, with all its references; an image without a prediction counts as having an empty
    caption. CIDEr-D is scaled as the COCO evaluation reports it, up to 10 and about 1.0 for good models; all others are
    in 0..1. "exact_match" is the fraction of captions that equal a reference word for word.
    """

    per_class_metric = "CIDEr-D"

    needs_dataset = ("image_ids", "references")

    def __init__(self, dataset: Dataset):
        require_annotations(dataset, "captions", "CaptionEvaluator")
        super().__init__(dataset)
        self._statistics: CaptionStatistics | None = None

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; images that were seen before are ignored.

        Args:
            predictions: `text` for each image.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            ConfigError: the model's predictions have no text.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            if "text" not in prediction:
                raise ConfigError(
                    f"evaluator CaptionEvaluator: predictions have {', '.join(prediction)} and no 'text'. It is for "
                    "models that write captions, with their vocabulary."
                )
            self.stored_predictions.setdefault(target["image_id"], prediction["text"])

    def _compute(self) -> dict[str, float]:
        """Return the metrics of the corpus."""
        ids = list(self.dataset.image_ids)
        if missing := len(ids) - len(self.stored_predictions):
            logger.warning("%d of %d images have no caption, which counts as an empty one", missing, len(ids))
        candidates = [tokenize_caption(self.stored_predictions.get(image_id, "")) for image_id in ids]
        references = [
            [tokenize_caption(text) for text in self.dataset.references(position)] for position in range(len(ids))
        ]
        exact = [candidate in its_references for candidate, its_references in zip(candidates, references)]
        means = {
            "ROUGE-L": rouge_l(candidates, references),
            "CIDEr-D": cider_d(candidates, references),
            "exact_match": exact,
        }
        arrays = {name: np.array(values, np.float64) for name, values in means.items()}
        self._statistics = CaptionStatistics(ids, bleu_counts(candidates, references), arrays)
        return self._metrics_of(self._statistics)

    def statistics(self) -> CaptionStatistics:
        if self._statistics is None:
            raise ValueError("CaptionEvaluator.statistics: call compute() first.")
        return self._statistics

    def _table_lines(self) -> list[str]:
        """Return a line for each metric, and one that says what they were computed from."""
        percent = {name: f"{100 * value:.1f} %" for name, value in self.metrics.items()}
        percent["CIDEr-D"] = f"{self.metrics['CIDEr-D']:.3f}"
        width = max(map(len, percent))
        lines = [f"{name:<{width}} {value:>8}" for name, value in percent.items()]
        num_references = sum(len(self.dataset.references(i)) for i in range(len(self.dataset.image_ids)))
        lines.append(
            f"{len(self.dataset.image_ids)} images, {num_references} references; CIDEr-D on COCO's scale (up to 10)"
        )
        return lines

    def per_class(self) -> dict[str, float]:
        """Return image id -> CIDEr-D of the last `compute()`, as captions have no classes."""
        if self._statistics is None:
            return {}
        scores = self._statistics.means["CIDEr-D"].tolist()
        return {str(image_id): score for image_id, score in zip(self.dataset.image_ids, scores)}

    def write_results(self, path: str | Path) -> list[Path]:
        """Write the captions in COCO's results format, a list of image_id and caption, which other tools also evaluate.

        Returns:
            the file.
        """
        path = Path(path)
        results = [
            {"image_id": int(image_id), "caption": self.stored_predictions[image_id]}  # ids may be NumPy integers
            for image_id in self.dataset.image_ids
            if image_id in self.stored_predictions
        ]
        write_text(path, json.dumps(results, ensure_ascii=False))
        return [path]

    def load_results(self, path: str | Path) -> None:
        """Read captions that were written earlier, in place of `update`.

        Raises:
            DataError: no such file, not in that format, an unknown image, or an image that occurs twice.
        """
        results = read_results(path)
        image_ids = {int(image_id) for image_id in self.dataset.image_ids}
        raise_issues(caption_result_issues(results, image_ids), f"results '{path}'")
        self.stored_predictions |= {entry["image_id"]: entry["caption"] for entry in results}
