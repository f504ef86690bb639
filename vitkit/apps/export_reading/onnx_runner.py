"""Predict with an exported ONNX file; needs only numpy, Pillow and onnxruntime.

`vitkit export` writes this program, run_NAME.py, beside the file NAME.onnx, whose metadata it reads.

    python run_NAME.py street.jpg more.jpg --out drawn    (prints JSON, and draws into the folder)
    python run_NAME.py "zwei kleine Hunde"                (with a translator)
    python run_NAME.py street.jpg --text "cat . dog ."    (with a text-prompted detector; may need tokenizers)

In a program: `Runner("NAME.onnx")("street.jpg")`.
"""

import argparse
import colorsys
import difflib
import hashlib
import io
import json
import os
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageOps, ImageSequence

PAD, UNK, BOS, EOS, SPACE = 0, 1, 2, 3, "\u2581"
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")  # others of Pillow's start programs, such as EPS


class Runner:
    """An exported model; called with an image (a file, a Pillow image or an array) or, if it translates, with a text.

    It returns, by task, labels, names and scores, and for objects also boxes_xyxy, masks, and keypoints (x, y and
    confidence of each); semantic; panoptic and segments_info; or text. Boxes, points and maps are in pixels of the
    image. Without a threshold, the lowest score of objects
    is that of the file; it may be a number, or a dictionary by class name, in which "*" is that of all others. A
    text-prompted detector also takes what to look for: phrases, as a list or as a text in which dots separate them.
    They are its labels; without a text, the classes that it was trained on.
    """

    prompts = None  # reads texts to look for

    def __init__(self, path, threshold=None):
        self.session, self.threshold = open_session(path), threshold
        self.info = {k: json.loads(v) for k, v in self.session.get_modelmeta().custom_metadata_map.items()}
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.step = open_session(Path(path).with_name(self.info["step"])) if "step" in self.info else None
        if "text" in self.info:
            self.prompts = PromptReader(Path(path), self.info)

    def __call__(self, source, text=None):
        if "source" in self.inputs:
            tokens = np.array([self.encode(source)], np.int64)
            return {"text": self.write({"source": tokens, "source_padding": np.zeros(tokens.shape, bool)})}
        image = open_image(source, self.info["preprocessing"]["channels"])
        inputs = self.prepare(image)
        if self.step is not None:
            return {"text": self.write(inputs)}
        if self.prompts is not None:
            about, read = self.prompts(text)
            self.info, inputs = self.info | about, inputs | read
        elif text is not None:
            raise ValueError("--text: the model takes no text. Leave it out.")
        outputs = {name: values[0] for name, values in run(self.session, inputs).items()}
        return self.postprocess(outputs, inputs, image.shape[:2])

    def prepare(self, image):
        """Return the inputs of an image (H, W, C): resized, and padded if the file takes images of only one size."""
        resize, size, limit = self.info["preprocessing"]["resize"] or {}, image.shape[:2], self.info["size"]
        if "crop" in resize:
            short, crop = resize["short_side"], resize["crop"]
            size = (crop, crop) if short is None else short_side_size(*size, short)
            pixels = resize_image(image, size, Image.Resampling[resize["interpolation"].upper()])
            top, left = (round((side - crop) / 2) for side in size)
            pixels = pixels[top : top + crop, left : left + crop]
        else:
            if "size" in resize:
                size = tuple(resize["size"])
            elif resize and not is_within(size, resize.get("unless_within")):
                size = short_side_size(*size, resize["short_side"], resize["max_size"], resize.get("rounding"))
            if limit is not None:
                scale = min(1, limit[0] / size[0], limit[1] / size[1])
                size = tuple(max(1, int(side * scale)) for side in size)
            pixels = resize_image(image, size)
        height, width, channels = pixels.shape
        images = np.zeros((1, channels, *(limit or (height, width))), pixels.dtype)
        images[0, :, :height, :width] = pixels.transpose(2, 0, 1)
        padding_mask = np.ones((1, *images.shape[2:]), bool)
        padding_mask[0, :height, :width] = False
        image_sizes = np.array([image.shape[:2]], np.int64)
        inputs = {"images": images, "padding_mask": padding_mask, "image_sizes": image_sizes}
        return {name: value for name, value in inputs.items() if name in self.inputs}

    def postprocess(self, outputs, inputs, original):
        """Return the results of one image, whose (height, width) is `original`."""
        if "class_scores" in outputs:
            labels = np.argsort(-outputs["class_scores"], kind="stable")[:5]
            return self.name_classes(labels, outputs["class_scores"][labels])
        settings, result = self.info["postprocessing"] or {"tasks": (), "mask_multiple": 1}, {}
        if "padding_mask" in inputs:
            inside = (~inputs["padding_mask"][0, :, 0]).sum(), (~inputs["padding_mask"][0, 0]).sum()
            padded = [side + -side % settings["mask_multiple"] for side in inputs["images"].shape[-2:]]

        def mask_of(query):
            mask = outputs["pred_masks"][query]
            parts = [divmod(n * side, total) for n, side, total in zip(inside, mask.shape, padded)]
            if settings["masks"] == "cut to boxes":
                mask = sigmoid(mask) - 0.5
            if settings["masks"] in ("resized once", "cut to boxes") and not any(rest for _, rest in parts):
                return resize_bilinear(mask[: parts[0][0], : parts[1][0]], original)
            mask = resize_bilinear(mask, padded)[: inside[0], : inside[1]]
            return (resize_nearest if settings["masks"] == "nearest" else resize_bilinear)(mask, original)

        if "semantic" in outputs:
            result["semantic"] = resize_nearest(outputs["semantic"][: inside[0], : inside[1]], original)
        if "scores" in outputs:
            result |= self.objects(outputs, mask_of, settings, original)
        if "panoptic" in settings["tasks"]:
            probabilities = softmax(outputs["pred_logits"])
            scores, labels = probabilities.max(-1), probabilities.argmax(-1)
            chosen = np.flatnonzero((labels < len(settings["things"])) & (scores > settings["object_threshold"]))
            if "overlap_threshold" in settings:
                regions = confident_regions(chosen, scores, mask_of, original, settings)
            else:
                ends = [-(-n * m // side) for n, m, side in zip(inside, outputs["pred_masks"].shape[-2:], padded)]
                masks = [resize_bilinear(mask[: ends[0], : ends[1]], inside) for mask in outputs["pred_masks"][chosen]]
                regions = large_regions(chosen, labels, masks, original, settings)
            result |= self.segments(regions, scores, labels, original)
        return result

    def name_classes(self, labels, scores):
        return {"labels": labels, "names": [self.info["classes"][label] for label in labels], "scores": scores}

    def objects(self, outputs, mask_of, settings, original):
        """Return the objects that reach their threshold, the highest score first."""
        scores, labels = outputs["scores"].copy(), outputs["labels"]
        lowest = self.lowest_scores(labels)
        keep, masks = (scores >= lowest) & (labels >= 0), {}
        if "instance" in settings["tasks"]:
            if settings["masks"] == "bilinear":  # Mask2Former: also scored by their masks' confidence, at most 1
                keep &= np.array(settings["things"])[labels]
            for i in np.flatnonzero(keep):
                mask = mask_of(outputs["queries"][i])
                masks[i] = mask > 0
                if settings["masks"] == "cut to boxes":
                    (left, top, right, bottom), (y, x) = outputs["boxes_xyxy"][i], np.indices(original, sparse=True)
                    masks[i] &= (y >= top) & (y < bottom) & (x >= left) & (x < right)
                if settings["masks"] == "bilinear":
                    scores[i] *= (sigmoid(mask) * masks[i]).sum() / (masks[i].sum() + 1e-6)
        chosen = [i for i in np.argsort(-scores, kind="stable") if keep[i] and scores[i] >= lowest[i]]
        result = self.name_classes(labels[chosen], scores[chosen])
        if "instance" in settings["tasks"]:
            result["masks"] = [masks[i] for i in chosen]
        if "keypoints" in outputs:
            result["keypoints"] = outputs["keypoints"][chosen]
        boxes = outputs["boxes_xyxy"][chosen] if "boxes_xyxy" in outputs else [box_around(masks[i]) for i in chosen]
        return result | {"boxes_xyxy": np.array(boxes, np.float32).reshape(-1, 4)}

    def lowest_scores(self, labels):
        """Return the threshold of each object: the one that is asked for, by its class or for all, or the file's."""
        classes, thresholds = self.info["classes"], self.info["thresholds"]
        asked = dict(self.threshold) if isinstance(self.threshold, dict) else {"*": self.threshold}
        rest = asked.pop("*", None)
        for name in asked.keys() - {*classes}:
            near = difflib.get_close_matches(name, classes, 1) or classes[:5]
            raise ValueError(f"threshold: the model has no class {name!r}. Did you mean {', '.join(map(repr, near))}?")
        if rest is not None:
            thresholds = {"overall": rest, "by_class": {}}
        named = thresholds["by_class"] | asked
        return np.array([named.get(classes[label], thresholds["overall"]) for label in labels])

    def segments(self, regions, scores, labels, original):
        """Join regions, pairs of a query and its pixels, to a panoptic map; stuff of one class is one segment."""
        things = self.info["postprocessing"]["things"]
        panoptic, segments, ids = np.zeros(original, np.int32), [], {}
        for query, region in regions:
            label = int(labels[query])
            if things[label] or label not in ids:
                ids[label] = len(segments) + 1
                about = {"name": self.info["classes"][label], "score": float(scores[query]), "is_thing": things[label]}
                segments.append({"id": ids[label], "label": label} | about)
            panoptic[region] = ids[label]
        return {"panoptic": panoptic, "segments_info": segments}

    def encode(self, text):
        """Return the token ids of a text."""
        return [*encode_tokens(normalize(text), self.info["tokens"]["source"]), EOS]

    def write(self, inputs):
        """Decode greedily: run the encoder once, then one step for each token."""
        state, tokens, text, limits = run(self.session, inputs), np.array([BOS]), "", self.info["decoding"]
        for number in range(limits["max_length"]):
            outputs = run(self.step, {"tokens": tokens} | state)
            logits = outputs.pop("logits")
            logits[:, [PAD, BOS, *([EOS] if number < limits["min_length"] else [])]] = -np.inf
            state |= {name.removeprefix("new_"): value for name, value in outputs.items()}
            tokens = logits.argmax(-1)
            if tokens[0] == EOS:
                break
            text += self.info["tokens"]["target"]["tokens"][tokens[0]]
        return text.replace(SPACE, " ").strip()


class PromptReader:
    """Reads and keeps the prompts of a text-prompted detector."""

    def __init__(self, path, info):
        self.info, self.kept = info, {}
        file = path.with_name(info["text"])
        if not file.is_file():
            raise ValueError(f"there is no {file.name} beside it, its text encoder. Copy both files of the export.")
        self.session = open_session(file)
        if json.loads(self.session.get_modelmeta().custom_metadata_map["text_id"]) != info["text_id"]:
            raise ValueError(f"{file.name} beside it was exported from another model. Copy both files of one export.")
        self.tokenizer = None
        if "tokenizer" in info:
            file = path.with_name(info["tokenizer"]["file"])
            if not file.is_file():
                raise ValueError(f"there is no {file.name} beside it, its tokenizer. Copy all files of the export.")
            content = file.read_bytes()
            if hashlib.sha256(content).hexdigest() != info["tokenizer"]["sha256"]:
                raise ValueError(f"{file.name} beside it is not the tokenizer that was exported with it.")
            try:
                from tokenizers import Tokenizer
            except ImportError:
                raise ValueError("to read a text it needs the package tokenizers: pip install tokenizers") from None
            self.tokenizer = Tokenizer.from_str(content.decode())
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    def __call__(self, text=None):
        """Return the classes and thresholds of a text, and the detector's inputs of it."""
        if text is None and self.info["phrases"] is None:
            raise ValueError("--text: the model looks for what a text names. Give one, such as 'cat . dog .'")
        phrases = self.info["phrases"] if text is None else split_phrases(text)
        about = {name: self.info[name] for name in ("classes", "thresholds")}
        if text is not None:
            about = {"classes": phrases, "thresholds": {"overall": self.info["prompts"]["threshold"], "by_class": {}}}
        key = tuple(phrases)
        if key not in self.kept:
            tokens, blocks = self.encode(phrases)
            features = run(self.session, {"tokens": tokens, "blocks": blocks})["text_features"]
            self.kept[key] = {"text_features": features, "blocks": blocks}
        return about, self.kept[key]

    def encode(self, phrases):
        """Return the tokens of phrases, each followed by a separator, and the number of each token's phrase."""
        numbers, limit = self.info["prompts"]["numbers"], self.info["prompts"]["max_tokens"]
        tokens, blocks = [numbers["bos"]], [-1]
        for block, phrase in enumerate(phrases):
            if self.tokenizer is None:
                ids = encode_tokens(phrase, self.info["tokens"]["target"])
            else:
                special = self.info["tokenizer"]["special"]
                ids = self.tokenizer.encode(phrase, add_special_tokens=False).ids
                ids = [numbers["unk"] if number in special else number for number in ids]
            if set(ids) <= {numbers["unk"]}:
                raise ValueError(f"--text: the tokenizer knows no piece of the phrase {phrase!r}.")
            tokens += [*ids, numbers["separator"]]
            blocks += [block] * (len(ids) + 1)
        if len(tokens) + 1 > limit:
            raise ValueError(
                f"--text: {len(phrases)} phrases have {len(tokens) + 1} tokens; the model takes {limit}. Give fewer "
                "phrases at a time."
            )
        return np.array([[*tokens, numbers["eos"]]], np.int64), np.array([[*blocks, -1]], np.int64)


OUTPUT_LIST = ".vitkit-output"  # lists what was drawn into its folder, which vitkit does not read as data


def split_phrases(text):
    """Return the phrases of a text in which dots separate them, or of a list."""
    phrases = [normalize(part) for part in (text.split(".") if isinstance(text, str) else text)]
    phrases = [phrase for phrase in phrases if phrase] if isinstance(text, str) else phrases
    if not phrases or not all(phrases):
        raise ValueError(f"--text: {text!r} has no phrase, or an empty one. Write it as in 'cat . dog .'")
    for number, phrase in enumerate(phrases):
        if set(".?") & set(phrase):
            raise ValueError(f"--text: the phrase {phrase!r} has a '.' or '?', where the model takes it to end.")
        if phrase.lower() in [other.lower() for other in phrases[:number]]:
            raise ValueError(f"--text: the phrase {phrase!r} is given twice; expected each phrase once.")
    return phrases


def normalize(text):
    return " ".join(unicodedata.normalize("NFC", text).replace(SPACE, "_").split())


def encode_tokens(text, vocabulary):
    """Return the ids of a normalized text's words or characters."""
    if vocabulary["kind"] not in ("word", "char"):
        raise ValueError(f"the source has {vocabulary['kind']} pieces, which need sentencepiece: give token ids.")
    text = (text.lower() if vocabulary["lowercase"] else text).replace(" ", SPACE)
    if vocabulary["kind"] == "word":
        text = re.findall(rf"{SPACE}?\w+|{SPACE}?[^\w{SPACE}]|{SPACE}", SPACE + text)
    ids = {token: number for number, token in enumerate(vocabulary["tokens"])}
    return [ids.get(token, UNK) for token in text]


def open_session(path):
    return onnxruntime.InferenceSession(str(path), providers=onnxruntime.get_available_providers())


def run(session, inputs):
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs))))


def open_image(source, channels=None):
    """Return an upright image (H, W, 3) uint8 RGB; or with `channels` (H, W, channels) uint16 as stored: from an array,
    a .npy file, or a file that Pillow reads, such as a TIFF with a page for each channel."""
    if channels is not None:
        if not isinstance(source, np.ndarray):
            if str(source).endswith(".npy"):
                source = np.load(source)
            else:
                opened = Image.open(source, formats=FORMATS)
                if ";16" in str(opened.tile) and not opened.mode.startswith("I"):
                    raise ValueError("of 16 bits in color, Pillow reads 8: store a .npy file, or a page per channel.")
                source = [np.array(ImageOps.exif_transpose(page)) for page in ImageSequence.Iterator(opened)]
        image = np.dstack(source) if isinstance(source, list) else source.reshape(*source.shape[:2], -1)
        if image.shape[2] != channels or image.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"has {image.shape[2]} channels of {image.dtype}; expected {channels} of 8 or 16 bits.")
        return image if image.dtype == np.uint16 else image.astype(np.uint16) * 257
    image = Image.fromarray(source) if isinstance(source, np.ndarray) else source
    image = image if isinstance(image, Image.Image) else Image.open(image, formats=FORMATS)
    # Pillow may open PNG and PPM with 32 bits instead of 16.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError(
            "its values have a sign, 32 bits or a fraction; expected unsigned integers of 8 or 16 bits. Convert them."
        )
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # of 16 bits: Pillow would turn values above 255 into 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image.convert("RGB"))


def resize_image(image, size, method=Image.Resampling.BILINEAR):
    """Resize (H, W, C) by Pillow, antialiased; uint16 by way of float32, Pillow's only other type that it resizes."""
    if image.shape[:2] == tuple(size):
        return image
    if image.dtype == np.uint8:
        return np.asarray(Image.fromarray(image).resize(size[::-1], method))
    planes = [
        Image.fromarray(plane.astype(np.float32)).resize(size[::-1], method) for plane in np.moveaxis(image, 2, 0)
    ]
    return np.dstack(planes).round().clip(0, 65535).astype(np.uint16)


def short_side_size(height, width, short_side, max_size=None, rounding=None):
    """Return (height, width) with this short side, or a smaller one if the long side would exceed `max_size`."""
    short, long = min(height, width), max(height, width)
    if rounding == "nearest":
        scale = min(short_side / short, (max_size or np.inf) / long)
        return max(1, round(height * scale)), max(1, round(width * scale))
    if max_size is not None and long / short * short_side > max_size:
        short_side = round(max_size * short / long)
    if short_side == 0:  # an image so long that its proportions cannot be kept
        return (1, max_size) if height < width else (max_size, 1)
    if short == short_side:
        return height, width
    return tuple(short_side if side == short else int(short_side * side / short) for side in (height, width))


def is_within(size, limits):
    """Whether an image's size is within the range of those that the model was evaluated on."""
    if limits is None:
        return False
    return limits["least_short"] <= min(size) <= limits["most_short"] and max(size) <= limits["most_long"]


def confident_regions(queries, scores, mask_of, original, settings):
    """Yield the pixels of which each query has the most confident class and mask, as in MaskFormer and Mask2Former."""
    best, owner, own, areas = np.full(original, -1, np.float32), np.full(original, -1), np.zeros(original, bool), {}
    for query in queries:
        p = sigmoid(mask_of(query))
        areas[query], better = (p >= 0.5).sum(), p * scores[query] > best
        best, owner = np.where(better, p * scores[query], best), np.where(better, query, owner)
        own = np.where(better, p >= 0.5, own)
    for query in queries:
        region = (owner == query) & (own if settings["cut_masks"] else True)
        if areas[query] and region.any() and (owner == query).sum() / areas[query] >= settings["overlap_threshold"]:
            yield query, region


def large_regions(queries, labels, masks, original, settings):
    """Yield the pixels of which each query has the highest mask logit, as in DETR; those of small regions are given to
    other queries."""
    kinds = labels[queries].tolist()
    first = [i if settings["things"][label] else kinds.index(label) for i, label in enumerate(kinds)]
    chosen, dropped = list(range(len(kinds))), True
    while chosen and dropped:
        owner = np.array(chosen)[np.argmax([masks[i] for i in chosen], axis=0)]
        owner = np.array(first)[owner] if len(chosen) == len(kinds) else owner
        owner = Image.fromarray(owner.astype(np.int32)).resize(original[::-1], Image.Resampling.NEAREST)
        regions = [(i, np.asarray(owner) == i) for i in chosen]
        regions = [(i, region) for i, region in regions if region.sum() > settings["smallest_area"]]
        chosen, dropped = [i for i, _ in regions], len(regions) < len(chosen)
    return [(queries[i], region) for i, region in regions] if chosen else []


def resize_bilinear(values, size):
    """Resize (h, w) bilinearly without antialiasing, with pixel centers at half-integer coordinates."""
    for axis, length in enumerate(size):
        last = values.shape[axis] - 1
        position = (((np.arange(length) + 0.5) * ((last + 1) / length)) - 0.5).clip(0, last).astype(np.float32)
        lower = position.astype(int)
        fraction = np.expand_dims(position - lower, 1 - axis)
        upper = np.take(values, np.minimum(lower + 1, last), axis)
        values = np.take(values, lower, axis) * (1 - fraction) + upper * fraction
    return values


def resize_nearest(values, size):
    """Resize (h, w) to the pixels that PyTorch's "nearest" mode takes, which differ from Pillow's."""
    rows, columns = ((np.arange(n) * (old / n)).astype(int) for n, old in zip(size, values.shape))
    return values[rows[:, None], columns]


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.clip(-80, None)))


def box_around(mask):
    """Return the (left, top, right, bottom) around a mask's pixels; zeros for an empty mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else (0, 0, 0, 0)


def color_of(number):
    """Return the RGB color in which vitkit draws a class or segment, counted from 1; black for 0."""
    if number == 0:
        return 0, 0, 0
    hue, value = (0.02 + (number - 1) * 0.381966) % 1.0, (1.0, 0.75, 0.9)[(number - 1) // 8 % 3]
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.85, value))


def draw(image, result):
    """Return a Pillow image of (H, W, C) with the results; of uint16, the first three channels or one are shown."""
    if image.dtype == np.uint16:
        image = (image[:, :, :3] if image.shape[2] >= 3 else image[:, :, [0] * 3]) * (255 / max(image.max(), 1))
    drawn = image.astype(np.float32)
    for field in {"semantic", "panoptic"} & result.keys():
        for number in np.unique(result[field]):
            drawn[result[field] == number] += color_of(int(number) + (field == "semantic"))
        drawn /= 2
    labels = result.get("labels", ())
    for label, mask in zip(labels, result.get("masks", ())):
        drawn[mask] = 0.5 * drawn[mask] + 0.5 * np.array(color_of(int(label) + 1))
    drawn = Image.fromarray(drawn.astype(np.uint8))
    pen, outlined = ImageDraw.Draw(drawn), dict(fill="white", stroke_width=2, stroke_fill="black")
    lines = [f"{name} {score:.2f}" for name, score in zip(result.get("names", ()), result.get("scores", ()))]
    for box, line, label in zip(result.get("boxes_xyxy", ()), lines, labels):
        pen.rectangle(tuple(map(float, box)), outline=color_of(int(label) + 1), width=3)
        extent = pen.textbbox((0, 0), line, stroke_width=2)[2:]
        # Inside the image, which boxes may leave.
        corner = [max(2, min(float(x) + 4, side - size)) for x, side, size in zip(box, drawn.size, extent)]
        pen.text(tuple(corner), line, **outlined)
    for points, label in zip(result.get("keypoints", ()), labels):
        for x, y in points[points[:, 2] >= 0.5, :2].tolist():
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=color_of(int(label) + 1), outline="white")
    pen.text((4, 4), result.get("text", "" if "boxes_xyxy" in result else "\n".join(lines)), **outlined)
    return drawn


def free_path(path, taken):
    """Return a path for a drawing, with a number if it is in `taken`, the inputs and the earlier drawings."""
    number, candidate = 1, path
    while os.path.realpath(candidate) in taken:
        number += 1
        candidate = path.with_stem(f"{path.stem}_{number}")
    taken.add(os.path.realpath(candidate))
    return candidate


def read_threshold(text):
    """Parse "0.5" or, by class and of all others, "cat=0.3,dog=0.45,0.6"."""
    scores, start = {}, ""  # of a name, which may contain commas
    for part in text.split(","):
        name, separator, score = (start + part).rpartition("=")
        try:
            scores[name if separator else "*"] = float(score)
            start = ""
        except ValueError:
            start = f"{start}{part},"
    if start or not all(0 <= score <= 1 for score in scores.values()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected scores from 0 to 1, such as 0.5 or cat=0.3,0.6")
    return scores


def to_json(result):
    """Return the results as plain values; maps and masks are replaced with their numbers of pixels."""
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in result.items()}
    for field in {"semantic", "panoptic"} & plain.keys():
        numbers, counts = np.unique(plain.pop(field), return_counts=True)
        plain[f"{field}_pixels"] = dict(zip(numbers.tolist(), counts.tolist()))
    return plain | ({"mask_pixels": [int(mask.sum()) for mask in plain.pop("masks")]} if "masks" in plain else {})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="images; texts for a translator")
    beside = Path(__file__).with_name(f"{Path(__file__).stem.removeprefix('run_')}.onnx")
    parser.add_argument(
        "--model", type=Path, default=beside, help="the ONNX file (default: NAME.onnx beside run_NAME.py)"
    )
    parser.add_argument("--text", help="what a text-prompted detector looks for: 'cat . dog .'")
    text = "lowest score of objects, or by class and of all others, cat=0.3,0.6 (default: as in the file)"
    parser.add_argument("--threshold", type=read_threshold, help=text)
    parser.add_argument("--out", type=Path, help="a folder for drawn images")
    args = parser.parse_args()
    if not args.model.is_file():
        sys.exit(f"error: --model {args.model}: no such file. Give the ONNX file that vitkit export wrote.")
    try:
        runner = Runner(args.model, args.threshold)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        sys.exit(f"error: {args.model}: {error}")
    try:
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: --out {args.out}: expected a folder ({error.strerror}).")
    failed, draws = False, args.out is not None and "source" not in runner.inputs
    taken = {os.path.realpath(source) for source in args.inputs if draws}  # Path.resolve fails at circular links
    for source in args.inputs:
        try:
            result = runner(source) if args.text is None else runner(source, args.text)
            print(json.dumps({"input": source} | to_json(result), ensure_ascii=False))
            if draws:
                image = open_image(source, runner.info["preprocessing"]["channels"])
                drawn = io.BytesIO()  # as Pillow does not notice that a disk is full while it writes a file
                draw(image, result).save(drawn, "PNG")
                path = free_path(args.out / f"{Path(source).stem}.png", taken)
                path.write_bytes(drawn.getvalue())
                with open(args.out / OUTPUT_LIST, "a", encoding="utf-8", errors="surrogateescape") as listed:
                    listed.write(f"{path.name}\n")
        except Exception as error:
            failed = True
            print(f"error: {source}: {error}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
