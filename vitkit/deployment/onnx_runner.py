"""Predict with an exported ONNX file; needs numpy, Pillow and onnxruntime, and nothing else.

`vitkit export` writes this program, run_NAME.py, beside the file NAME.onnx, whose metadata it reads.

    python run_NAME.py street.jpg more.jpg --out drawn    (prints JSON, and draws into the folder)
    python run_NAME.py "zwei kleine Hunde"                (with a translator)

In a program: `Runner("NAME.onnx")("street.jpg")`.
"""

import argparse
import colorsys
import json
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageOps

PAD, UNK, BOS, EOS = range(4)
SPACE = "\u2581"
"""The character that stands for the space before a word in vocabularies."""
NUM_LISTED = 5
"""The number of classes that are listed for a classified image."""


class Runner:
    """An exported model; called with a picture (a file, a Pillow image or an array) or, if it translates, with a text.

    Args:
        path: the .onnx file.
        threshold: the lowest score of objects that are returned; None: the thresholds of the file.
    """

    def __init__(self, path: str | Path, threshold: float | None = None):
        path = Path(path)
        self.session = _session(path)
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.info = {name: json.loads(value) for name, value in metadata.items()}
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.threshold = threshold
        self.step = _session(path.with_name(self.info["step"])) if "step" in self.info else None

    def __call__(self, source: Any) -> dict[str, Any]:
        """Predict on one picture, or translate one text.

        Returns:
            depending on the task: labels, names and scores, and for objects also boxes_xyxy and masks; semantic;
            panoptic and segments_info; or text. Boxes and maps are in pixels of the picture.
        """
        if "source" in self.inputs:
            tokens = np.array([self._encode(source)], np.int64)
            return {"text": self._write({"source": tokens, "source_padding": np.zeros(tokens.shape, bool)})}
        if channels := self.info["preprocessing"].get("channels"):
            raise ValueError(f"the model takes {channels} channels of 16 bits: use vitkit.load, which reads them.")
        picture = open_picture(source)
        inputs = self.prepare(picture)
        if self.step is not None:
            return {"text": self._write(inputs)}
        outputs = _run(self.session, inputs)
        return self.postprocess({name: values[0] for name, values in outputs.items()}, inputs, picture.size[::-1])

    def prepare(self, picture: Image.Image) -> dict[str, np.ndarray]:
        """Return the inputs of one picture: resized, and padded where the file was exported for one size."""
        pixels = np.asarray(self._resized(picture)).transpose(2, 0, 1)
        size = height, width = pixels.shape[1:]
        if self.info["size"] is not None:
            size = self.info["size"]
        images = np.zeros((1, 3, *size), np.uint8)
        padding_mask = np.ones((1, *size), bool)
        images[0, :, :height, :width] = pixels
        padding_mask[0, :height, :width] = False
        image_sizes = np.array([picture.size[::-1]], np.int64)
        inputs = {"images": images, "padding_mask": padding_mask, "image_sizes": image_sizes}
        return {name: inputs[name] for name in self.inputs}

    def _resized(self, picture: Image.Image) -> Image.Image:
        resize, (width, height) = self.info["preprocessing"]["resize"], picture.size
        if resize and "crop" in resize:
            size = (resize["crop"], resize["crop"])
            if resize["short_side"] is not None:
                size = short_side_size(height, width, resize["short_side"])
            picture = picture.resize(size[::-1], Image.Resampling[resize["interpolation"].upper()])
            left, top = (round((side - resize["crop"]) / 2) for side in picture.size)
            return picture.crop((left, top, left + resize["crop"], top + resize["crop"]))
        size = (height, width)
        if resize and "size" in resize:
            size = tuple(resize["size"])
        elif resize and not _is_within(size, resize.get("unless_within")):
            size = short_side_size(height, width, resize["short_side"], resize["max_size"])
        if self.info["size"] is not None:
            scale = min(1, *(limit / side for limit, side in zip(self.info["size"], size)))
            size = tuple(max(1, int(side * scale)) for side in size)
        return picture if size == (height, width) else picture.resize(size[::-1], Image.Resampling.BILINEAR)

    def postprocess(
        self, outputs: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], original: tuple[int, int]
    ) -> dict[str, Any]:
        """Return the results of one picture; `original` is its (height, width)."""
        if "class_scores" in outputs:
            labels = np.argsort(-outputs["class_scores"], kind="stable")[:NUM_LISTED]
            return self._named(labels, outputs["class_scores"][labels])
        settings, result = self.info["postprocessing"], {}
        if "padding_mask" in inputs:
            inside = (~inputs["padding_mask"][0, :, 0]).sum(), (~inputs["padding_mask"][0, 0]).sum()
            multiple = settings["mask_multiple"]
            padded = tuple(-(-side // multiple) * multiple for side in inputs["images"].shape[-2:])
        if "semantic" in outputs:
            labels = outputs["semantic"][: inside[0], : inside[1]]
            result["semantic"] = resize_nearest(labels, original)
        if "scores" in outputs:
            chosen = self._shown(outputs["scores"], outputs["labels"])
            result |= self._named(outputs["labels"][chosen], outputs["scores"][chosen])
            result["boxes_xyxy"] = outputs["boxes_xyxy"][chosen]
            if "instance" in settings["tasks"]:
                masks = (
                    resize_bilinear(outputs["pred_masks"][i], padded)[: inside[0], : inside[1]] > 0 for i in chosen
                )
                result["masks"] = [resize_nearest(mask, original) for mask in masks]
            if "panoptic" in settings["tasks"]:
                result |= self._detr_panoptic(outputs, padded, inside, original)
        elif "pred_masks" in outputs:

            def mask_of(query: int) -> np.ndarray:
                logits = resize_bilinear(outputs["pred_masks"][query], padded)[: inside[0], : inside[1]]
                return resize_bilinear(logits, original)

            if "instance" in settings["tasks"]:
                result |= self._instances(outputs["pred_logits"], mask_of)
            if "panoptic" in settings["tasks"]:
                result |= self._panoptic(outputs["pred_logits"], mask_of, original)
        return result

    def _named(self, labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
        return {"labels": labels, "names": [self.info["classes"][label] for label in labels], "scores": scores}

    def _shown(self, scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the indices of the objects that reach their threshold, the highest score first."""
        order = np.argsort(-scores, kind="stable")
        return order[scores[order] >= self._thresholds(labels[order])]

    def _thresholds(self, labels: np.ndarray) -> np.ndarray:
        if self.threshold is not None:
            return np.full(len(labels), self.threshold)
        overall, by_class = (self.info["thresholds"][name] for name in ("overall", "by_class"))
        return np.array([by_class.get(self.info["classes"][label], overall) for label in labels])

    def _instances(self, logits: np.ndarray, mask_of: Any) -> dict[str, Any]:
        """Return Mask2Former's instances: the best pairs of query and class, scored by class and mask confidence."""
        settings = self.info["postprocessing"]
        probabilities = softmax(logits)[:, :-1]
        pairs = np.argsort(-probabilities, axis=None, kind="stable")[: settings["num_instances"]]
        queries, labels = np.divmod(pairs, probabilities.shape[1])
        scores = probabilities[queries, labels]
        # Scores are multiplied by the mask's confidence, at most 1, so pairs below the threshold can be dropped here.
        keep = np.array(settings["things"])[labels] & (scores >= self._thresholds(labels))
        queries, labels, scores = queries[keep], labels[keep], scores[keep]
        masks = []
        for i, query in enumerate(queries):
            mask = mask_of(query)
            inside = mask > 0
            scores[i] *= (sigmoid(mask) * inside).sum() / (inside.sum() + 1e-6)
            masks.append(inside)
        chosen = self._shown(scores, labels)
        masks = [masks[i] for i in chosen]
        boxes = np.array([box_around(mask) for mask in masks], np.float32).reshape(-1, 4)
        return self._named(labels[chosen], scores[chosen]) | {"boxes_xyxy": boxes, "masks": masks}

    def _panoptic(self, logits: np.ndarray, mask_of: Any, original: tuple[int, int]) -> dict[str, Any]:
        """Assign each pixel to the query with the most confident class and mask, as MaskFormer and Mask2Former do."""
        settings, things = self.info["postprocessing"], self.info["postprocessing"]["things"]
        probabilities = softmax(logits)
        scores, labels = probabilities.max(-1), probabilities.argmax(-1)
        queries = np.flatnonzero((labels != len(things)) & (scores > settings["object_threshold"]))
        best = np.full(original, -1, np.float32)
        owner, own = np.full(original, -1), np.zeros(original, bool)
        areas = {}
        for query in queries:
            p = sigmoid(mask_of(query))
            areas[query] = (p >= 0.5).sum()
            better = p * scores[query] > best
            best, owner = np.where(better, p * scores[query], best), np.where(better, query, owner)
            own = np.where(better, p >= 0.5, own)
        panoptic, segments, stuff = np.zeros(original, np.int32), [], {}
        for query in queries:
            region = owner == query
            owned = region.sum()
            region &= own if settings["cut_masks"] else True
            if not (areas[query] and region.any()) or owned / areas[query] < settings["overlap_threshold"]:
                continue
            label = int(labels[query])
            if label not in stuff or things[label]:
                segments.append(self._segment(len(segments) + 1, label, scores[query]))
                stuff[label] = len(segments)
            panoptic[region] = len(segments) if things[label] else stuff[label]
        return {"panoptic": panoptic, "segments_info": segments}

    def _detr_panoptic(
        self, outputs: Mapping[str, np.ndarray], padded: Sequence[int], inside: Sequence[int], original: tuple[int, int]
    ) -> dict[str, Any]:
        """Assign each pixel to the query with the highest mask logit; drop small segments and reassign their pixels."""
        settings, probabilities = self.info["postprocessing"], softmax(outputs["pred_logits"])
        scores, labels = probabilities.max(-1), probabilities.argmax(-1)
        confident = (labels != probabilities.shape[-1] - 1) & (scores > settings["object_threshold"])
        scores, labels, masks = scores[confident], labels[confident].tolist(), outputs["pred_masks"][confident]
        height, width = (-(-n * m // side) for n, m, side in zip(inside, masks.shape[-2:], padded))
        masks = masks[:, :height, :width]
        first = [i if settings["things"][label] else labels.index(label) for i, label in enumerate(labels)]
        chosen, owner = list(range(len(labels))), np.full(original, -1)
        while chosen:
            owner = np.argmax([resize_bilinear(masks[i], inside) for i in chosen], axis=0)
            if len(chosen) == len(labels):
                owner = np.array(first)[owner]
            owner = Image.fromarray(owner.astype(np.int32)).resize(original[::-1], Image.Resampling.NEAREST)
            owner = np.asarray(owner)
            large = [i for n, i in enumerate(chosen) if (owner == n).sum() > settings["smallest_area"]]
            if len(large) == len(chosen):
                break
            chosen = large
        segments = [self._segment(n, labels[i], scores[i]) for n, i in enumerate(chosen, start=1)]
        panoptic = owner.astype(np.int32) + 1 if chosen else np.zeros(original, np.int32)
        return {"panoptic": panoptic, "segments_info": segments}

    def _segment(self, number: int, label: int, score: float) -> dict[str, Any]:
        name, is_thing = self.info["classes"][label], bool(self.info["postprocessing"]["things"][label])
        return {"id": number, "label": label, "name": name, "score": float(score), "is_thing": is_thing}

    def _encode(self, text: str) -> list[int]:
        vocabulary = self.info["tokens"]["source"]
        if vocabulary["kind"] not in ("word", "char"):
            raise ValueError(f"the source has {vocabulary['kind']} pieces, which need sentencepiece: give token ids.")
        text = " ".join(unicodedata.normalize("NFC", text).replace(SPACE, "_").split())
        text = (text.lower() if vocabulary["lowercase"] else text).replace(" ", SPACE)
        if vocabulary["kind"] == "word":
            text = re.findall(rf"{SPACE}?\w+|{SPACE}?[^\w{SPACE}]|{SPACE}", SPACE + text)
        ids = {token: number for number, token in enumerate(vocabulary["tokens"])}
        return [*(ids.get(token, UNK) for token in text), EOS]

    def _write(self, inputs: dict[str, np.ndarray]) -> str:
        """Decode greedily: run the encoder once, then one step for each token."""
        state, tokens, written = _run(self.session, inputs), np.array([BOS]), []
        while len(written) < self.info["decoding"]["max_length"]:
            outputs = _run(self.step, {"tokens": tokens} | state)
            logits = outputs.pop("logits")
            logits[:, [PAD, BOS]] = -np.inf
            if len(written) < self.info["decoding"]["min_length"]:
                logits[:, EOS] = -np.inf
            state |= {name.removeprefix("new_"): value for name, value in outputs.items()}
            tokens = logits.argmax(-1)
            if tokens[0] == EOS:
                break
            written.append(int(tokens[0]))
        vocabulary = self.info["tokens"]["target"]["tokens"]
        return "".join(vocabulary[token] for token in written).replace(SPACE, " ").strip()


def _session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=onnxruntime.get_available_providers())


def _run(session: onnxruntime.InferenceSession, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs))))


def open_picture(source: Any) -> Image.Image:
    """Return an upright RGB picture from a file, a Pillow image or an array (H, W, 3) uint8."""
    picture = Image.fromarray(source) if isinstance(source, np.ndarray) else source
    picture = picture if isinstance(picture, Image.Image) else Image.open(picture)
    return ImageOps.exif_transpose(picture).convert("RGB")


def short_side_size(height: int, width: int, short_side: int, max_size: int | None = None) -> tuple[int, int]:
    """Return (height, width) with this short side, or a smaller one if the long side would exceed `max_size`."""
    short, long = min(height, width), max(height, width)
    if max_size is not None and long / short * short_side > max_size:
        short_side = round(max_size * short / long)
    if short_side == 0:  # so long a picture that its proportions cannot be kept
        return (1, max_size) if height < width else (max_size, 1)
    if short == short_side:
        return height, width
    if width < height:
        return int(short_side * height / width), short_side
    return short_side, int(short_side * width / height)


def _is_within(size: tuple[int, int], limits: Mapping[str, int] | None) -> bool:
    """Whether a picture's size is within the range of those that the model was evaluated on."""
    if limits is None:
        return False
    return limits["least_short"] <= min(size) <= limits["most_short"] and max(size) <= limits["most_long"]


def resize_bilinear(values: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Resize (h, w) bilinearly without antialiasing, with pixel centres at half-integer coordinates."""
    for axis, length in enumerate(size):
        last = values.shape[axis] - 1
        position = (((np.arange(length) + 0.5) * ((last + 1) / length)) - 0.5).clip(0, last).astype(np.float32)
        lower = position.astype(int)
        share = np.expand_dims(position - lower, 1 - axis)
        upper = np.take(values, np.minimum(lower + 1, last), axis)
        values = np.take(values, lower, axis) * (1 - share) + upper * share
    return values


def resize_nearest(values: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Resize (h, w) to the pixels that PyTorch's "nearest" mode takes (Pillow takes others)."""
    rows, columns = (np.arange(n) * (old / n) for n, old in zip(size, values.shape))
    return values[rows.astype(int)[:, None], columns.astype(int)]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Elementwise sigmoid."""
    return 1 / (1 + np.exp(-logits.clip(-80, None)))


def box_around(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Return the (left, top, right, bottom) around a mask's pixels; zeros for an empty mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else (0, 0, 0, 0)


def color_of(number: int) -> tuple[int, int, int]:
    """Return the RGB color in which vitkit draws a class or segment, counted from 1; black for 0."""
    if number == 0:
        return 0, 0, 0
    hue, value = (0.02 + (number - 1) * 0.381966) % 1.0, (1.0, 0.75, 0.9)[(number - 1) // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw(picture: Image.Image, result: Mapping[str, Any]) -> Image.Image:
    """Draw the results onto a copy of the picture."""
    drawn = np.array(picture)
    for field in ("semantic", "panoptic"):
        if field in result:
            numbers = np.unique(result[field])
            palette = np.array([color_of(int(n) + (field == "semantic")) for n in numbers], np.uint8)
            colors = palette[np.searchsorted(numbers, result[field])]
            drawn = (0.5 * np.array(picture) + 0.5 * colors).astype(np.uint8)
    for label, mask in zip(result.get("labels", ()), result.get("masks", ())):
        drawn[mask] = 0.5 * drawn[mask] + 0.5 * np.array(color_of(int(label) + 1))
    drawn = Image.fromarray(drawn)
    pen = ImageDraw.Draw(drawn)
    for box, name, score, label in zip(*(result.get(key, ()) for key in ("boxes_xyxy", "names", "scores", "labels"))):
        pen.rectangle(tuple(map(float, box)), outline=color_of(int(label) + 1), width=3)
        pen.text((float(box[0]) + 4, float(box[1]) + 4), f"{name} {score:.2f}", fill="white", stroke_width=2,
                 stroke_fill="black")  # fmt: skip
    if "boxes_xyxy" not in result and "names" in result:
        lines = [f"{name} {score:.2f}" for name, score in zip(result["names"], result["scores"])]
        pen.text((4, 4), "\n".join(lines), fill="white", stroke_width=2, stroke_fill="black")
    if "text" in result:
        pen.text((4, 4), result["text"], fill="white", stroke_width=2, stroke_fill="black")
    return drawn


def as_json(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results as plain values; maps and masks are replaced with their numbers of pixels."""
    plain = {}
    for name, value in result.items():
        if name in ("semantic", "panoptic"):
            numbers, counts = np.unique(value, return_counts=True)
            plain[f"{name}_pixels"] = dict(zip(numbers.tolist(), counts.tolist()))
        elif name == "masks":
            plain["mask_pixels"] = [int(mask.sum()) for mask in value]
        else:
            plain[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return plain


def main() -> None:
    name = Path(__file__).stem.removeprefix("run_")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="pictures; texts for a translator")
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name(f"{name}.onnx"))
    parser.add_argument("--threshold", type=float, help="least score of the objects (as the file says)")
    parser.add_argument("--out", type=Path, help="a folder for drawn pictures")
    args = parser.parse_args()
    # ONNX Runtime's exceptions have no common base class.
    try:
        runner = Runner(args.model, args.threshold)
    except Exception as error:
        sys.exit(f"error: {args.model}: {error}")
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"error: --out {args.out}: expected a folder ({error.strerror}).")
    failed = 0
    for source in args.inputs:
        try:
            result = runner(source)
            print(json.dumps({"input": source} | as_json(result), ensure_ascii=False))
            if args.out is not None and "source" not in runner.inputs:
                draw(open_picture(source), result).save(args.out / f"{Path(source).stem}.png")
        except Exception as error:
            failed += 1
            print(f"error: {source}: {error}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
