"""A text-prompted detector needs no file but its own: it is loaded, predicts, is explained and analyzed."""

import numpy as np
import pytest
import torch
from torch import nn

import vitkit
from vitkit.apps.export_reading.graphs import image_graph
from vitkit.apps.export_writing.metadata import describe
from vitkit.apps.inference import load
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.models.base import ModelOnBackbone
from vitkit.models.text_prompted import TextPrompted, TextReading
from vitkit.nn.attention import MultiHeadAttention
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.ops.images import normalize_images
from vitkit.registry import BACKBONES, MODELS
from vitkit.structures import AttentionLayers
from vitkit.weights import save_checkpoint

IMAGE = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
PROMPT = "car red dog"


class PromptedDetector(TextPrompted, ModelOnBackbone):
    """Queries that attend to the image and to the words of a prompt, and score each word."""

    returns = ("boxes_xyxy", "phrases")

    def __init__(self, backbone, *, num_queries=5, d_model=16):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        self.queries = nn.Embedding(num_queries, d_model)
        self.words = nn.Embedding(256, d_model)
        self.image_attn, self.word_attn = MultiHeadAttention(d_model, 2), MultiHeadAttention(d_model, 2)
        self.box = nn.Linear(d_model, 4)

    def forward(self, images, padding_mask=None, text=()):
        (features,) = self.backbone(normalize_images(images, padding_mask)).values()
        memory = features.flatten(2).transpose(1, 2)
        texts = [self.read_text(sought).words for sought in text]
        numbers = [[sum(word.encode()) % 256 for word in words] for words in texts]
        words = self.words(torch.tensor(numbers, device=memory.device))
        queries = self.queries.weight.expand(len(images), -1, -1)
        queries = queries + self.image_attn(queries, memory, memory)
        queries = queries + self.word_attn(queries, words, words)
        logits = queries @ words.transpose(1, 2)
        return {"pred_logits": logits, "pred_boxes": self.box(queries).sigmoid(), "words": texts}

    def postprocess(self, outputs, image_sizes):
        scores, best = outputs["pred_logits"].sigmoid().max(-1)
        boxes_xyxy = scale_boxes(cxcywh_to_xyxy(outputs["pred_boxes"]), image_sizes)
        phrases = [[words[k] for k in row.tolist()] for words, row in zip(outputs["words"], best)]
        return [dict(scores=s, boxes_xyxy=b, phrases=p) for s, b, p in zip(scores, boxes_xyxy, phrases)]

    def read_text(self, text):
        words = text.split()
        return TextReading(words, words, range(len(words)))

    def attention_layers(self):
        return AttentionLayers(decoder=[self.image_attn], prompt=[self.word_attn])


CONFIG = dict(
    model=dict(type="PromptedDetector", backbone=dict(type="ViT", d_model=16, depth=1, num_heads=2, image_size=32)),
    data=dict(val=dict(type="ShapesDetection", transforms=dict(type="EvalResize", size=(48, 64)))),
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    MODELS.load_packages()
    patch.setattr(MODELS, "_constructors", dict(MODELS._constructors))
    MODELS.register(PromptedDetector)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("prompted") / "weights.pth"
    save_checkpoint(path, {"model": build_model(CONFIG["model"]).state_dict()})
    yield path
    patch.undo()


def test_text_names_what_is_detected(weights):
    predictor = load(CONFIG, weights)
    assert predictor.classes == [] and predictor.finds_objects
    prediction = predictor(IMAGE, text=PROMPT, threshold=0.0)
    assert len(prediction) == 5 and set(prediction.names) <= set(PROMPT.split())
    assert prediction.draw().dtype == np.uint8 and prediction.summary().startswith("image")
    other = predictor.with_text("tree")(IMAGE, threshold=0.0)
    assert set(other.names) == {"tree"}
    with pytest.raises(ConfigError, match="text: not given, and PromptedDetector looks for what it names"):
        predictor(IMAGE)
    with pytest.raises(ConfigError, match="tiles: the phrases of PromptedDetector are not merged"):
        predictor(IMAGE, text=PROMPT, tiles=32)


def test_other_models_take_no_text(tmp_path):
    model = dict(type="Classifier", backbone=dict(CONFIG["model"]["backbone"]), num_classes=2)
    save_checkpoint(tmp_path / "weights.pth", {"model": build_model(model).state_dict(), "classes": ["a", "b"]})
    predictor = load(dict(model=model), tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match="text: Classifier takes no text to look for. Leave it out."):
        predictor(IMAGE, text=PROMPT)


def test_attention_to_image_and_words_is_explained(weights, tmp_path):
    explanation = vitkit.explain(CONFIG, weights, image=IMAGE, text=PROMPT, threshold=0.0, html=True, out=tmp_path)
    names = {path.name for path in explanation.files}
    assert {"image_decoder.png", "image_prompt_heads.png", "image_queries.html", "image_points.png"} <= names
    assert all(path.is_file() for path in explanation.files)


def test_its_file_needs_a_graph_of_its_own(weights):
    predictor = load(CONFIG, weights).with_text(PROMPT)
    metadata = describe(predictor, CONFIG, name="prompted", license=None)
    assert metadata["type"] == "PromptedDetector" and metadata["postprocessing"] is None
    with pytest.raises(ConfigError, match="no graph is defined for PromptedDetector.*export_graph"):
        image_graph(predictor.model)


def test_its_costs_are_counted(weights):
    costs = vitkit.analyze(CONFIG, size=(48, 64))
    assert costs.parts["word_attn"]["macs"] > 0
