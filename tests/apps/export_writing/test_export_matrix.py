"""Every kind of model in every format, the cells of apps/export_writing/measurements.md: printed with -m slow -s.

With VITKIT_EXPORT_SIZE=160x160, files take images of one size, which are traced in a third of the time.
"""

import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from vitkit import build_model, load_config
from vitkit.apps.export_reading.loading import open_exported
from vitkit.apps.export_writing import export as export_module
from vitkit.apps.export_writing.checks import image_size, run_graph
from vitkit.apps.export_writing.export import ExportSettings, export_model, parts_of
from vitkit.apps.export_writing.metadata import describe
from vitkit.apps.inference import Predictor, Translator
from vitkit.data.synthetic.world import World
from vitkit.errors import ConfigError
from vitkit.models.classifier import Classifier
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools.common import image_size as parse_size

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

RESNET = "model.backbone=dict(type='ResNet', depth=18, norm='bn', pretrained=False)"
SIZE = os.environ.get("VITKIT_EXPORT_SIZE")
SWIN = "model.backbone=dict(type='Swin', embed_dim=48, depths=[1,2,1,1], num_heads=[2,2,4,4], pretrained=False)"
SWIN_V2 = SWIN.replace("'Swin'", "'SwinV2'")
MVIT = "model.backbone=dict(type='MViT', depths=[1,1,1,1], pretrained=False)"
LAYERS = ["model.head.num_encoder_layers=1", "model.head.num_decoder_layers=2", "model.num_queries=20"]
DETR = [
    "model.neck.out_channels=64",
    "model.head.d_model=64",
    "model.head.num_heads=4",
    "model.head.d_ffn=128",
    *LAYERS,
]
WIDER = ["model.neck.out_channels=128", "model.head.d_model=128", "model.head.num_heads=8"]
RT_DETR = [
    *("model.backbone.pretrained=false", "model.neck.num_blocks=1", "model.head.num_decoder_layers=2"),
    *("model.num_queries=20", "model.training_queries=[]"),
]
DEIMV2 = [
    *("model.backbone.pretrained=false", "model.head.num_decoder_layers=2", "model.num_queries=20"),
    "model.training_queries=[]",
]
SMALL_VIT = [
    "model.backbone.vit=dict(type='ViT', d_model=192, depth=3, num_heads=3, positions='rotary')",
    *("model.backbone.blocks=[0,1,2]", "model.neck.num_blocks=1"),
]
RF_DETR = [
    *("model.backbone.pretrained=false", "model.backbone.depth=4", "model.backbone.d_model=192"),
    *("model.backbone.global_blocks=[2]", "model.backbone.out_features=['block2','block4']"),
    *("model.head.num_decoder_layers=2", "model.head.d_ffn=256", "model.num_queries=20", "model.num_detections=20"),
    "model.training_queries=[]",
]
MASKS = "model.head.masks='BlockMasks'"
MODELS = {  # name: (config, overrides)
    "classifier, ResNet": ("quickstart/classifier", []),
    "classifier, ViT": ("vit_b16_in1k", ["model.backbone.depth=2", "model.backbone.d_model=192"]),
    "classifier, Swin": ("swin_tiny_in1k", [SWIN]),
    "classifier, Swin V2": ("swinv2_tiny_in1k", [SWIN_V2]),
    "classifier, MViTv2": ("mvitv2_tiny_in1k", [MVIT]),
    "DETR": ("quickstart/detr", LAYERS),
    "DETR on Swin V2": ("detr_r50", [SWIN_V2, *DETR]),
    "DETR on MViTv2": ("detr_r50", [MVIT, *DETR]),
    "DETR with masks": ("detr_r50_panoptic", [RESNET, *DETR, *WIDER]),
    "Deformable DETR": ("quickstart/deformable_detr", []),
    "DINO": ("quickstart/dino", []),
    "DINO, sampling by pixels": ("quickstart/dino", ["model.head.rounds_padding=false"]),
    "RT-DETR": ("rtdetr_r18", RT_DETR),
    "RT-DETRv2": ("rtdetrv2_r18", [*RT_DETR, "model.head.num_points=[2,4,3]"]),
    "D-FINE": ("dfine_n_coco", RT_DETR),
    "DEIMv2 on HGNetV2": ("deimv2_atto_coco", DEIMV2),
    "DEIMv2 on ViT": ("deimv2_s_coco", [*DEIMV2, *SMALL_VIT]),
    "Deformable DETR with masks": ("quickstart/deformable_detr", [MASKS]),
    "DINO with masks": ("quickstart/dino", [MASKS]),
    "RT-DETR with masks": ("rtdetr:depth=18,masks=true", RT_DETR),
    "RT-DETRv2 with masks": ("rtdetrv2:depth=18,masks=true", RT_DETR),
    "D-FINE-seg": ("dfine_seg_n_coco", RT_DETR),
    "DEIM with masks": ("deim:size=n,masks=true", RT_DETR),
    "DEIMv2 with masks": ("deimv2:size=atto,masks=true", DEIMV2),
    "ECDet": ("ecdet_s_coco", [*DEIMV2, "model.backbone.depth=3", "model.neck.num_blocks=1"]),
    "ECSeg": ("ecseg_s_coco", [*DEIMV2, "model.backbone.depth=3", "model.neck.num_blocks=1"]),
    "ECPose": ("ecpose_s_coco", [*DEIMV2, "model.backbone.depth=3", "model.neck.num_blocks=1"]),
    "RF-DETR": ("rf_detr_n_coco", RF_DETR),
    "RF-DETR-Seg": ("rf_detr_seg_n_coco", RF_DETR),
    "RF-DETR, keypoints": ("rf_detr_keypoints_coco", RF_DETR),
    "MaskFormer": ("quickstart/maskformer_semantic", []),
    "Mask2Former": ("quickstart/mask2former_instance", []),
    "EoMT": ("quickstart/eomt", []),
    "per-pixel": ("per_pixel_baseline_r50_ade20k", [RESNET]),
    "D-FINE-seg, semantic": ("dfine_sem_n_cityscapes", ["model.backbone.pretrained=false"]),
    "captioner, Transformer": ("quickstart/captioning", []),
    "captioner, LSTM": ("caption_sat_soft_flickr8k", [RESNET, "model.backbone.out_features=['res5']"]),
    "translator": ("quickstart/translation", []),
}
MASKED = [name for name in MODELS if name.endswith(" with masks") and name != "DETR with masks"] + ["D-FINE-seg"]
DEIMV2S = ("DEIMv2 on HGNetV2", "DEIMv2 on ViT")
OVER_TOLERANCE = {
    (name, form)
    for name in (
        "DINO",
        "DINO, sampling by pixels",
        "Deformable DETR",
        "RT-DETR",
        "RT-DETRv2",
        "D-FINE",
        "RF-DETR",
        "RF-DETR-Seg",
        "RF-DETR, keypoints",
        *DEIMV2S,
        "ECDet",
        "ECSeg",
        "ECPose",
        *MASKED,
    )
    for form in ("onnx fp16", "onnx int8", "torch fp16")
} - {("RF-DETR", "onnx fp16")}
"""What may differ, as these models select locations by score: with random weights the scores are nearly equal, and
rounding may change topk, depending on the size of the images and the processor."""
FORMATS = {
    "onnx": dict(format="onnx"),
    "onnx int8": dict(format="onnx", precision="int8"),
    "torch": dict(format="torch"),
    "onnx fp16": dict(format="onnx", precision="fp16"),
    "torch fp16": dict(format="torch", precision="fp16"),
}
WORDS = ["two small dogs run over green grass", "zwei kleine Hunde rennen"]


def predictor_of(config):
    vocabulary = Vocabulary.train("word", WORDS)
    torch.manual_seed(0)
    if "captioning" in config.name or "caption_" in config.name:
        model = build_model(config["model"], vocabularies=dict(target=vocabulary))
        return Predictor(model, ())
    if "translation" in config.name:
        vocabularies = dict(source=vocabulary, target=vocabulary)
        return Translator(build_model(config["model"], vocabularies=vocabularies), vocabularies)
    model = build_model(config["model"])
    if config["model"]["type"] in (
        "DEIMv2",
        "ECDet",
    ):  # with its initial weights, locations differ less in score than by rounding
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.kaiming_normal_(parameter, nonlinearity="linear")
        torch.nn.init.zeros_(model.head.proposals.class_embed.bias)
    # A classifier's images have the size that it was trained at; other models' images are small.
    transforms = config["data"]["val"].get("transforms") if isinstance(model, Classifier) else None
    return Predictor(model, [str(k) for k in range(1000)], transforms=transforms)


def cpu_seconds(*functions, rounds=3):
    """Return the minimum CPU time of each function, with the functions called in turn."""
    times = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, taken in zip(functions, times):
            started = time.process_time()
            function()
            taken.append(time.process_time() - started)
    return [min(taken[1:]) for taken in times]


def share_programs(monkeypatch):
    """Let the files of one precision be written from one program, and ONNX files of it from one conversion."""
    for owner, name in ((export_module, "trace"), (torch.onnx, "export")):
        monkeypatch.setattr(owner, name, Cached(getattr(owner, name)))


class Cached:
    """A function whose results are kept by the kind and precision of its first argument."""

    def __init__(self, function):
        self.function, self.results = function, {}

    def __call__(self, graph, *arguments, **settings):
        program = isinstance(graph, torch.export.ExportedProgram)
        key = id(graph) if program else (type(graph), next(graph.parameters()).dtype)
        if key not in self.results:
            self.results[key] = self.function(graph, *arguments, **settings), graph  # so that its id is not reused
        return self.results[key][0]


def print_row(cell, exported, part):
    """Print how much the files differ from the model, and the time of the last file relative to PyTorch's."""
    largest = max((d for part in exported for d in part.differences), key=lambda d: d.largest)
    inputs, file = part.batches[0], open_exported(exported[-1].path)
    of_file, of_torch = cpu_seconds(lambda: file.run(inputs), lambda: run_graph(part.graph, inputs))
    times = f"{1e3 * of_file:.1f} ms | {1e3 * of_torch:.1f} ms | {of_file / of_torch:.2f}"
    print(f"\nROW | {cell} | {largest.largest:.0e} ({largest.output}) | {times}")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_every_format(name, tmp_path, monkeypatch):
    path, overrides = MODELS[name]
    config = load_config(path, overrides)
    predictor = predictor_of(config)
    share_programs(monkeypatch)
    images = [np.ascontiguousarray(World(image_size=size).scene(0).image) for size in (160, 128)]
    metadata = describe(predictor, config, name="tiny", license=None)
    failures = []
    for form, options in FORMATS.items():
        settings = ExportSettings(overwrite=True, **options)
        if isinstance(predictor, Predictor):
            given = parse_size(SIZE) if SIZE and not isinstance(predictor.model, Classifier) else None
            settings = replace(settings, size=image_size(predictor, None) or given)
        out = tmp_path / f"a.{'onnx' if settings.format == 'onnx' else 'pt2'}"
        try:
            exported = export_model(predictor, out, settings, images=images, metadata=metadata)
        except ConfigError as error:
            failures.append(form)
            print(f"\nROW | {name} | {form} | {error}")
            continue
        print_row(f"{name} | {form}", exported, parts_of(predictor, settings, images)[-1])
    assert {(name, form) for form in failures} <= OVER_TOLERANCE
