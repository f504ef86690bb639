"""A model with the preparation of its inputs: from images to predictions."""

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitkit.apps.inference.encoded_text import EncodedOnce
from vitkit.apps.inference.fused import FusedCopy
from vitkit.apps.inference.inputs import ImageLike, Inputs, NamedImage, find_images, make_batches, to_array
from vitkit.apps.inference.prediction import Prediction, Threshold, make_threshold
from vitkit.apps.inference.prefetch import map_ahead
from vitkit.apps.inference.tiles import predict_tiles
from vitkit.apps.inference.tiling import TileResult, Tiling, make_tiling
from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.pipelines import EvalResize
from vitkit.devices import OUT_OF_MEMORY, Precision, autocast, is_out_of_memory, resolve_precision
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.io.channel_files import as_rgb
from vitkit.io.image_files import MAX_PIXELS, to_tensor
from vitkit.models.query_masks import QueryMasks
from vitkit.protocols.model import DenseModel, GenerativeModel, Model
from vitkit.registry import TRANSFORMS, require_base
from vitkit.structures import Batch, ImageSizes, KeypointInfo, Sample, ScoreThresholds
from vitkit.text.prompts import Caption, Prompt
from vitkit.weights import LoadReport

logger = logging.getLogger("vitkit")
Read = TypeVar("Read")
OnFailure = Callable[[str, Exception], None]
"""Takes the name and the error of an input that is left out."""


class _Loaded(NamedTuple):
    """An image as read and as the model takes it."""

    name: str
    image: np.ndarray
    sample: Sample | None
    """None if the image is predicted in tiles."""


class _UnreadImage(NamedTuple):
    """The error of an image that cannot be read or prepared."""

    name: str
    error: Exception


class Predictor:
    """A model with the preparation of its images; made by `load`.

    What runs is a fused copy of the model (`Model.fuse`), made anew if the model's weights change. The model itself
    runs while it has hooks, for instance those of an `AttentionRecorder`.

    Args:
        model: on its device, in evaluation mode.
        classes: names of its labels.
        transforms: the transforms of its validation images.
        precision: the precision of autocast; "bf16" takes about half the memory.
        max_image_pixels: the largest width x height of a file that is decoded.
        report: the report of loading the weights.
        thresholds: the lowest scores of objects that are shown.
        category_ids: the category id of each class in the training data.
        keypoint_info: the keypoints that it predicts; None: none, or they are not known by name.
        image_sizes: the sizes of the images that the model was evaluated on. If `transforms` do not resize, an image
            that is smaller or larger than all of these is resized to their median, as the model would miss most objects
            of sizes that it was not trained on.
        channels: number of channels that images are read with, as stored; None: RGB of 8 bits.
        text: what a text-prompted model looks for unless it is told otherwise, a phrase for each of `classes`; None: it
            must be told, see `with_text`.
    """

    sampling: ClipSampling | None = None
    """Which frames make a clip; None for a model of images."""

    def __init__(
        self,
        model: Model,
        classes: Sequence[str],
        *,
        transforms: Any = None,
        precision: Precision = "fp32",
        max_image_pixels: int = MAX_PIXELS,
        report: LoadReport | None = None,
        thresholds: ScoreThresholds | None = None,
        category_ids: Sequence[int | str] | None = None,
        keypoint_info: KeypointInfo | None = None,
        image_sizes: ImageSizes | None = None,
        channels: int | None = None,
        text: Prompt | None = None,
    ):
        self.model: Any = model.eval()
        self._fused = FusedCopy()
        self._is_dense = isinstance(model, DenseModel)
        self.text: Prompt | Caption | None = text
        self._encoded: EncodedOnce | None = None
        self.channels = channels
        self.report = report
        self.classes = list(classes)
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        self.device = next(model.parameters()).device
        self.precision = resolve_precision(precision, self.device)
        self.max_image_pixels = max_image_pixels
        self.category_ids = category_ids
        self.keypoint_info = keypoint_info
        self.image_sizes = None if image_sizes is None or _resizes(self.transforms, channels) else image_sizes
        self._has_said_size = False
        self._predicts = isinstance(model, DenseModel | GenerativeModel)
        learns_features = isinstance(model, Model) and "features" in model.returns
        if not self._predicts and not learns_features:
            raise ConfigError(f"{type(model).__name__} has no postprocess(), so it predicts nothing in images.")
        require_base("model", type(model), Model)
        self.thresholds = thresholds or ScoreThresholds(model.score_threshold)
        if "images" not in model.takes:
            takes = ", ".join(model.takes)
            raise ConfigError(f"{type(model).__name__} takes {takes}, so it predicts nothing in images.")

    def with_text(self, text: Prompt, *, text_threshold: float | None = None) -> "Predictor":
        """Return a predictor that looks for the objects of a text, for a text-prompted model.

        Args:
            text: phrases, as a list or as one text in which dots separate them: "a red star . a cat ." They are the
                classes: a label is the index of a phrase, and its score the mean of its words'.
            text_threshold: None; or a number, such as 0.25, if `text` is a caption in which it is not known which words
                name a thing: "a dog chases the red ball". Objects are then those whose best word reaches `threshold`,
                each named by the words around it that reach `text_threshold`, so classes differ from image to image.
        Raises:
            ConfigError: the model takes no text, or the threshold is not in 0..1.
            DataError: the text is not a prompt that the model can read.
        """
        if "text" not in self.model.takes:
            raise ConfigError(f"text: {type(self.model).__name__} takes no text to look for. Leave it out.")
        predictor = copy.copy(self)
        predictor.text = text if text_threshold is None else Caption(text, text_threshold)  # type: ignore[arg-type]  # which checks it
        predictor.classes, predictor.category_ids = list(predictor.encoded_text().reading.phrases), None
        predictor.thresholds = ScoreThresholds(self.model.score_threshold)
        return predictor

    def check_text(self) -> None:
        """Check that a text-prompted model has a text that it can read.

        Raises:
            ConfigError: it has none.
            DataError: it cannot read it.
        """
        if "text" in self.model.takes:
            self.encoded_text()

    def encoded_text(self) -> EncodedOnce:
        """Return the encoded text of a text-prompted model; errors are those of `check_text`."""
        text = self._require_text()
        if self._encoded is None or self._encoded.text is not text:
            self._encoded = EncodedOnce(self.model, text)
        return self._encoded

    def inputs_of(self, batch: Batch, network: Any) -> dict[str, Any]:
        """Return the inputs of a batch on the device for a network that runs, the model or its fused copy: a text is
        encoded once for all batches."""
        if "text" not in self.model.takes:
            return batch.inputs
        encoded = self.encoded_text().by(network, len(batch), self.device)
        return batch.inputs if encoded is None else batch.inputs | {"text": encoded}

    def _require_text(self) -> Prompt | Caption:
        if self.text is None:
            raise ConfigError(
                f"text: not given, and {type(self.model).__name__} looks for what it names. Give one, such as "
                "text='a red car. a dog.' (--text)."
            )
        return self.text

    @property
    def tasks(self) -> Sequence[str]:
        """The tasks that a segmentation model is configured for, see `Model.tasks`."""
        tasks: Sequence[str] = self.model.tasks
        return tasks

    @property
    def finds_objects(self) -> bool:
        """Whether the model predicts objects with scores that `thresholds` apply to, not just classes, maps or text."""
        return not self.model.returns or "boxes_xyxy" in self.model.returns

    def thresholds_for(self, threshold: Threshold | None) -> ScoreThresholds:
        """Return the thresholds that a caller asks for; None: the model's own.

        Raises:
            ConfigError: a score is not in 0..1, there is no such class, or the classes are not known before an image.
        """
        if threshold is None:
            return self.thresholds
        if isinstance(self.text, Caption) and not isinstance(threshold, int | float):
            raise ConfigError("threshold: the classes of a caption differ from image to image. Give one for all.")
        return make_threshold(threshold, self.classes, self.thresholds)

    def __call__(
        self,
        source: Any,
        *,
        text: Prompt | None = None,
        text_threshold: float | None = None,
        threshold: Threshold | None = None,
        batch_size: int = 1,
        tiles: int | Tiling | None = None,
    ) -> Prediction | list[Prediction] | Iterator[Prediction]:
        """Predict on images from any source, see `find_images`.

        Args:
            source: one image; several, as a list, a batch, a folder or a pattern; or a stream of them: a generator,
                a video or the number of a camera.
            threshold: the lowest score of objects that are shown, of all or by class name: {"cat": 0.3}, or with "*"
                for all others, {"cat": 0.3, "*": 0.6}. What is not given is that of the model's `thresholds`.
            text, text_threshold: what a text-prompted model looks for, see `with_text`; None: the classes of the data
                that it was trained on.
            batch_size, tiles: see `stream`.
        Returns:
            one `Prediction`, a list of them, or an iterator that predicts as it goes. Files of a folder or a pattern
            that cannot be read or predicted are left out with a warning.
        Raises:
            DataError: there is nothing to read, or an item is not an image.
        """
        kind = self._find(source).kind
        predictions = self.stream(
            source, text=text, text_threshold=text_threshold, threshold=threshold, batch_size=batch_size, tiles=tiles
        )
        if kind == "stream":
            return predictions
        return next(predictions) if kind == "one" else list(predictions)

    def predict(
        self,
        source: Any,
        *,
        text: Prompt | None = None,
        text_threshold: float | None = None,
        threshold: Threshold | None = None,
        batch_size: int = 1,
        tiles: int | Tiling | None = None,
    ) -> list[Prediction]:
        """Predict like `__call__`, but always return a list, also for one image or for a stream once it has ended."""
        return list(
            self.stream(
                source,
                text=text,
                text_threshold=text_threshold,
                threshold=threshold,
                batch_size=batch_size,
                tiles=tiles,
            )
        )

    def stream(
        self,
        source: Any,
        *,
        text: Prompt | None = None,
        text_threshold: float | None = None,
        threshold: Threshold | None = None,
        batch_size: int = 1,
        tiles: int | Tiling | None = None,
        on_failure: OnFailure | None = None,
        workers: int = 0,
    ) -> Iterator[Prediction]:
        """Predict on the images a batch at a time, so that memory need not hold all of them.

        Args:
            source: see `__call__`; its items may also be pairs of a name and an image.
            threshold, text, text_threshold: see `__call__`.
            batch_size: images in a batch. Above 1, images of different sizes are padded, which changes the results of
                models that do not isolate padding. With `tiles`, which all have one size, the tiles in a batch.
            tiles: predict in tiles of this many pixels, see `Tiling`, for images much larger than the model's.
            on_failure: called for each image that cannot be read or predicted, which is then left out; None: an error,
                or a warning for files of a folder or a pattern.
            workers: threads that read and prepare the next images while the model runs.
        Raises:
            DataError: see `__call__`.
            ConfigError: the model's predictions cannot be merged from tiles, or a number is out of range.
        """
        if not self._predicts:
            raise ConfigError(
                f"{type(self.model).__name__} predicts nothing in images: it trains a backbone for other models. Train "
                "one of these with model.backbone.pretrained and the run's folder."
            )
        if text is None and text_threshold is not None:
            raise ConfigError("text_threshold: is for the words of a caption. Give one, text='a dog chases the ball'.")
        if workers < 0:
            raise ConfigError(f"workers={workers}: expected at least 0.")
        if text is not None:
            predictor = self.with_text(text, text_threshold=text_threshold)
            yield from predictor.stream(
                source, threshold=threshold, batch_size=batch_size, tiles=tiles, on_failure=on_failure, workers=workers
            )
            return
        self.check_text()
        tiling = make_tiling(tiles)
        thresholds = self.thresholds_for(threshold)
        inputs = self._find(source)
        failures = _Failures()
        on_failure = on_failure or (failures.leave_out if inputs.leaves_out_broken else None)
        num_predicted, size = 0, 1 if tiling else batch_size
        for batch in make_batches(self._load_ahead(inputs.named, workers, 2 * size, prepares=tiling is None), size):
            loaded = []
            for read in batch:
                if isinstance(read, _Loaded):
                    loaded.append(read)
                elif on_failure is None:
                    raise read.error
                else:
                    on_failure(read.name, read.error)
            for item, fields in self._run_each(loaded, tiling, batch_size, on_failure) if loaded else ():
                num_predicted += 1
                classes = self.classes
                if "phrases" in fields:  # the classes of this image
                    classes = list(dict.fromkeys(fields["phrases"]))
                    labels = [classes.index(phrase) for phrase in fields["phrases"]]
                    fields = fields | {"labels": torch.tensor(labels, dtype=torch.int64)}
                about = classes, thresholds, self.category_ids, self.keypoint_info
                yield Prediction(item.name, as_rgb(item.image), fields, *about)
        if failures.errors and not num_predicted:
            raise failures.errors[0]

    def _load_ahead(
        self, named: Iterable[NamedImage], workers: int, ahead: int, *, prepares: bool
    ) -> Iterator[_Loaded | _UnreadImage]:
        """Read the images and prepare them for the model, in order, in threads if there are `workers`."""
        local = threading.local()

        def load(named: NamedImage) -> _Loaded | _UnreadImage:
            name, image = named
            if not hasattr(local, "transforms"):  # albumentations keeps the state of the image that it transforms
                local.transforms = copy.deepcopy(self.transforms) if workers else self.transforms
            try:
                image = self.to_array(image, name)
                return _Loaded(name, image, self._sample(image, local.transforms) if prepares else None)
            except ConfigError:
                raise
            except Exception as error:
                return _UnreadImage(name, error)

        return map_ahead(load, named, workers=workers, ahead=ahead + workers) if workers else map(load, named)

    def _run_each(
        self, batch: Sequence[_Loaded], tiling: Tiling | None, batch_size: int, on_failure: OnFailure | None
    ) -> Iterator[tuple[_Loaded, dict[str, Any]]]:
        """Yield the images of a batch with the model's results; of a batch that fails, each image by itself."""
        try:
            if tiling is None:
                prepared = self._collate([item.sample for item in batch if item.sample is not None])
                results = self.run_batch(prepared, [item.image.shape[:2] for item in batch], lazily=True)
            else:
                results = [self.run_tiles(batch[0].image, tiling, batch_size=batch_size)]
        except ConfigError:
            raise
        except Exception as error:  # an image of a size or content that the model cannot take can raise anything
            if on_failure is None:
                raise
            if len(batch) == 1:
                on_failure(batch[0].name, error)
                return
        else:
            yield from zip(batch, results)
            return
        for item in batch:
            yield from self._run_each([item], tiling, batch_size, on_failure)

    def _find(self, source: Any) -> Inputs:
        return find_images(source, channels=self.channels)

    def _each(
        self, inputs: Inputs, read: Callable[[NamedImage], Read], on_failure: OnFailure | None = None
    ) -> Iterator[Read]:
        """Read the inputs one after the other; `on_failure` gets those that fail, or, of a folder or a pattern, they
        are left out.

        Raises:
            DataError: an input given by name cannot be read, or none of a folder or a pattern can.
        """
        num_read, failures = 0, _Failures()
        on_failure = on_failure or (failures.leave_out if inputs.leaves_out_broken else None)
        if on_failure is None:
            yield from map(read, inputs.named)
            return
        for pair in inputs.named:
            try:
                result = read(pair)
            except ConfigError:
                raise
            except Exception as error:
                on_failure(pair[0], error)
                continue
            num_read += 1
            yield result
        if num_read == 0 and failures.errors:
            raise failures.errors[-1]

    def to_array(self, image: ImageLike, name: str = "image") -> np.ndarray:
        """Read or convert an image to the model's input: an array (H, W, 3) uint8 RGB, or (H, W, channels) uint16; see
        the function `to_array`."""
        return to_array(image, name, max_pixels=self.max_image_pixels, channels=self.channels)

    def run(self, images: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Predict on arrays as from `to_array`, as one batch; return the model's results for each, on the CPU."""
        return self.run_batch(self.prepare(images), [image.shape[:2] for image in images])

    def run_tiles(self, image: np.ndarray, tiling: Tiling, *, batch_size: int = 1) -> dict[str, Any]:
        """Predict on an array as from `to_array` in tiles, see `predict_tiles`; like `run` if it fits one tile."""
        if not self._is_dense:
            raise ConfigError(
                f"tiles: {type(self.model).__name__} predicts no boxes, masks or maps. Predict without tiles."
            )
        if "phrases" in self.model.returns or isinstance(self.text, Caption):
            raise ConfigError(
                f"tiles: the phrases of {type(self.model).__name__} are not merged. Predict without tiles."
            )
        if len(tiling.tiles(*image.shape[:2])) == 1:
            return self.run([image])[0]
        return predict_tiles(image, tiling, self._run_tiles, batch_size=batch_size)

    @torch.inference_mode()
    def _run_tiles(self, images: Sequence[np.ndarray]) -> list[TileResult]:
        sizes = [image.shape[:2] for image in images]
        batch = self.prepare(images).to(self.device)
        with autocast(self.device, self.precision), _explain_memory_error(sizes):
            network = self._fused.of(self.model)
            outputs = network(**self.inputs_of(batch, network))
            results = [dict(result) for result in self.model.postprocess(outputs, sizes)]
        tiles = []
        for i, (result, size) in enumerate(zip(results, sizes)):
            scores = None
            if result.pop("semantic", None) is not None:
                scores = self.model.semantic_scores(outputs, i, size)
            tiles.append(TileResult(_on_cpu(result), scores))
        return tiles

    @torch.inference_mode()
    def run_batch(
        self, batch: Batch, sizes: Sequence[tuple[int, int]], *, lazily: bool = False
    ) -> list[dict[str, Any]]:
        """Predict on a batch of images or clips; `sizes` are the (height, width) of the original images.

        Args:
            lazily: whether masks may be made only when they are asked for, see `Model.postprocess_lazily`.
        """
        batch = batch.to(self.device)
        with autocast(self.device, self.precision), _explain_memory_error(sizes):
            model = self._fused.of(self.model)
            if self._is_dense:
                postprocess = model.postprocess_lazily if lazily else model.postprocess
                results = postprocess(model(**self.inputs_of(batch, model)), sizes)
            else:
                results = model.generate(batch.inputs)
        return [_on_cpu(result) for result in results]

    def prepare(self, images: Sequence[np.ndarray]) -> Batch:
        """Collate arrays as from `to_array` into a batch of model inputs, see `as_evaluated`."""
        return self._collate([self._sample(image, self.transforms) for image in images])

    def _sample(self, image: np.ndarray, transforms: Any) -> Sample:
        return {"image": to_tensor(self._transform(image, transforms)), "target": {}}

    def _collate(self, samples: Sequence[Sample]) -> Batch:
        batch = Batch.collate(samples)
        if "text" in self.model.takes:
            batch.inputs["text"] = [self._require_text()] * len(samples)
        return batch

    def as_evaluated(self, image: np.ndarray) -> np.ndarray:
        """Resize an array as from `to_array` if necessary, see `image_sizes`, and apply the validation transforms."""
        return self._transform(image, self.transforms)

    def _transform(self, image: np.ndarray, transforms: Any) -> np.ndarray:
        image = self._resize(image)
        return image if transforms is None else transforms(AnnotatedImage(image), seed=0).image

    def _resize(self, image: np.ndarray) -> np.ndarray:
        """Return the image at a size like the model's images; the first resize is logged."""
        sizes = self.image_sizes
        if sizes is None or sizes.holds(*image.shape[:2]):
            return image
        resize = EvalResize(short_side=sizes.median_short, max_size=sizes.most_long)
        resized = resize(AnnotatedImage(image)).image
        if not self._has_said_size:
            self._has_said_size = True
            height, width = image.shape[:2]
            logger.warning(
                "images are resized to a short side of %d pixels, a long one of at most %d (here from %dx%d to "
                "%dx%d), the size that the model was trained and evaluated at",
                sizes.median_short,
                sizes.most_long,
                width,
                height,
                *resized.shape[1::-1],
            )
        return resized


def failure_line(name: str, error: Exception) -> str:
    """Describe in one line why an input was left out."""
    lines = str(error).splitlines() or [""]
    reason = str(error) if isinstance(error, VitkitError) else f"{type(error).__name__}: {lines[0]}"
    return reason if name in reason else f"'{name}': {reason}"


class _Failures:
    """The errors of inputs that were left out, each with a warning."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def leave_out(self, name: str, error: Exception) -> None:
        self.errors.append(error)
        logger.warning("left out: %s", failure_line(name, error))


@contextmanager
def _explain_memory_error(sizes: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the largest image in the batch.

    Args:
        sizes: (height, width) of the batch's images.
    Raises:
        DataError: the device ran out of memory.
    """
    try:
        yield
    except OUT_OF_MEMORY as error:
        if not is_out_of_memory(error):
            raise
        height, width = max(sizes, key=math.prod)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"out of memory at {len(sizes)} images, the largest of {width}x{height} pixels ({reason}). Use a smaller "
            "batch_size (--batch-size), tiles (--tiles 800) for boxes, masks and maps, or smaller images."
        ) from error


def _on_cpu(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, Tensor | QueryMasks) else value for key, value in result.items()}


def _resizes(transforms: Any, channels: int | None) -> bool:
    """Whether transforms change the size of a small or of a large image."""
    if transforms is None:
        return False
    kind = np.uint8 if channels is None else np.uint16
    images = (np.zeros((*size, channels or 3), kind) for size in ((96, 64), (1000, 1600)))
    return any(transforms(AnnotatedImage(image), seed=0).image.shape != image.shape for image in images)
