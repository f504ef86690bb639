"""Every kind of model in every format: the cells of model_zoo/EXPORT.md, which this prints (-m slow -s)."""

import time

import numpy as np
import pytest
import torch

from vitkit import build_model, load_config
from vitkit.data.synthetic.world import World
from vitkit.inference import Predictor, Translator
from vitkit.inference.export import ExportSettings, export_model, parts_of
from vitkit.inference.export_checks import run_graph
from vitkit.inference.export_metadata import describe
from vitkit.inference.exported import open_exported
from vitkit.models.classifier import Classifier
from vitkit.vocabulary import Vocabulary

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SMALL = "model.backbone=dict(type='ResNet', depth=18, norm='bn', pretrained=False)"
LAYERS = ["model.head.num_encoder_layers=1", "model.head.num_decoder_layers=2", "model.num_queries=20"]
SWIN = "model.backbone=dict(type='Swin', embed_dim=48, depths=[1,2,2,1], num_heads=[2,2,4,4], pretrained=False)"
SWIN_V2 = SWIN.replace("'Swin'", "'SwinV2'")
VIT = "model.backbone=dict(type='ViT', d_model=96, depth=2, num_heads=2, pretrained=False)"
MVIT = "model.backbone=dict(type='mvitv2_tiny', pretrained=False)"
DETR = [
    "model.neck.out_channels=64",
    "model.head.d_model=64",
    "model.head.num_heads=4",
    "model.head.d_ffn=128",
    *LAYERS,
]
DEFORMABLE = [*DETR, "model.num_queries=30"]
MODELS = {  # name: (config, overrides, the one size of images; None: any)
    "classifier, ResNet-18": ("quickstart/classifier", [], None),
    "classifier, ViT": ("vit_b16_in1k", ["model.backbone.depth=2", "model.backbone.d_model=192"], None),
    "classifier, Swin": ("swin_tiny_in1k", [SWIN], (224, 224)),
    "classifier, Swin V2": ("swinv2_tiny_in1k", [SWIN_V2], (256, 256)),
    "classifier, MViTv2": ("mvitv2_tiny_in1k", [], (224, 224)),
    "DETR": ("quickstart/detr", [], None),
    "DETR on ViT": ("detr_r50", [VIT, *DETR], None),
    "DETR on Swin": ("detr_r50", [SWIN, *DETR], (160, 192)),
    "DETR on Swin V2": ("detr_r50", [SWIN_V2, *DETR], (160, 192)),
    "DETR on MViTv2": ("detr_r50", [MVIT, *DETR], None),
    "DETR with masks": ("detr_r50_panoptic", [SMALL, *DETR], None),
    "Deformable DETR": ("quickstart/deformable_detr", [], None),
    "Deformable DETR, two stages": ("deformable_detr_r50_two_stage", [SMALL, *DEFORMABLE], None),
    "DINO": ("quickstart/dino", [], None),
    "MaskFormer": ("quickstart/maskformer_semantic", [], None),
    "Mask2Former": ("quickstart/mask2former_instance", [], None),
    "EoMT": ("quickstart/eomt", [], None),
    "per-pixel": ("per_pixel_baseline_r50_ade20k", [SMALL], None),
    "captioner, Transformer": ("quickstart/captioning", [], None),
    "captioner, LSTM": ("caption_sat_soft_flickr8k", [SMALL, "model.backbone.out_features=['res5']"], None),
    "translator": ("quickstart/translation", [], None),
}
FORMATS = {
    "onnx": dict(format="onnx"),
    "onnx fp16": dict(format="onnx", half=True),
    "onnx int8": dict(format="onnx", quantize="int8"),
    "torch": dict(format="torch"),
    "torch fp16": dict(format="torch", half=True),
}
WORDS = ["two small dogs run over green grass", "zwei kleine Hunde rennen"]


def predictor_of(config):
    vocabulary = Vocabulary.train("word", WORDS)
    torch.manual_seed(0)
    if "captioning" in str(config.path) or "caption_" in str(config.path):
        model = build_model(config["model"], vocabularies=dict(target=vocabulary))
        return Predictor(model, ())
    if "translation" in str(config.path):
        vocabularies = dict(source=vocabulary, target=vocabulary)
        return Translator(build_model(config["model"], vocabularies=vocabularies), vocabularies)
    model = build_model(config["model"])
    # A classifier's images have the size that it was trained at; others are kept small.
    transforms = config["data"]["val"].get("transforms") if isinstance(model, Classifier) else None
    return Predictor(model, [str(k) for k in range(1000)], transforms=transforms)


def cpu_seconds(*functions, rounds=3):
    """The least CPU time of each function, in turns."""
    times = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, taken in zip(functions, times):
            started = time.process_time()
            function()
            taken.append(time.process_time() - started)
    return [min(taken[1:]) for taken in times]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_every_format(name, form, tmp_path):
    path, overrides, size = MODELS[name]
    config = load_config(path, overrides)
    predictor, settings = predictor_of(config), ExportSettings(size=size, **FORMATS[form])
    pictures = [np.ascontiguousarray(World(image_size=size).scene(0).image) for size in (160, 128)]
    out = tmp_path / f"a.{'onnx' if settings.format == 'onnx' else 'pt2'}"
    metadata = describe(predictor, config, name="tiny", licence=None)
    exported = export_model(predictor, out, settings=settings, pictures=pictures, metadata=metadata)
    megabytes = sum(part.path.stat().st_size for part in exported) / 2**20
    largest = max((d for part in exported for d in part.differences), key=lambda d: d.largest)
    part = parts_of(predictor, settings, pictures)[-1]
    inputs, file = part.batches[0], open_exported(exported[-1].path)
    of_file, of_torch = cpu_seconds(lambda: file.run(inputs), lambda: run_graph(part.graph, inputs))
    print(
        f"\nROW | {name} | {form} | {largest.largest:.0e} ({largest.output}) | {megabytes:.1f} MiB | "
        f"{1e3 * of_file:.1f} ms | {1e3 * of_torch:.1f} ms | {of_file / of_torch:.2f}"
    )
