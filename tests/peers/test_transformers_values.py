"""Published models by their names on the hub, against the outputs that the tests of transformers state.

With a network: VITKIT_HUB_TESTS=1 pytest -m peers tests/peers/test_transformers_values.py
With VITKIT_COCO, a folder with COCO 2017, also their published AP on its 5,000 validation images.

The numbers are from the integration tests of transformers 5 (Apache-2.0; tests/models/*/test_modeling_*.py at commit
02d4017 for DETR, 0044904 for Deformable DETR, 080c858 for RT-DETR, 0159620 for RT-DETRv2, D-FINE and Swin, 07a43b0 for
RF-DETR, 04ae757 for Mask2Former, 00a9cab for MaskFormer, 052b1dc for ViT, 0106543 for SwinV2, 00d316b for ResNet,
040e1a7 for TimeSformer, 0004a3c for Grounding DINO, 0572371 for MM-Grounding-DINO), on COCO's photo 39769,
TimeSformer's on a clip of spaghetti.
"""

import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.grounding_models import BERT_TOKENS, bert_tokenizer, library_grounding
from helpers.transformers_models import build_theirs
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou

import vitkit
from vitkit import model_zoo

pytestmark = pytest.mark.peers
needs_hub = pytest.mark.skipif("VITKIT_HUB_TESTS" not in os.environ, reason="set VITKIT_HUB_TESTS=1 to download models")

PHOTO = (
    "https://raw.githubusercontent.com/huggingface/transformers/main/tests/fixtures/tests_samples/COCO/000000039769.png"
)


@dataclass
class Expected:
    """What a model predicts for the photo: two cats on a couch, with two remotes."""

    logits: list
    """Those of the first three classes, for the first queries or for the image."""
    boxes: list | None = None
    """Center and width of the first queries' boxes."""
    masks: list | None = None
    """The corner of the first query's mask."""
    found: list | None = None
    """(class, score) of the best detections, or of all above 0.3 if `is_complete`."""
    is_complete: bool = False
    box: tuple | None = None
    """(class, xyxy) of one of them."""
    zoo: str | None = None
    """The same model in vitkit's zoo, which has its published AP."""
    text: str | None = None
    """What a text-prompted model looks for; its logits are those of the first three tokens, and `found` has the
    probabilities of the best word, as for a caption."""


EXPECTED = {
    "facebook/detr-resnet-50": Expected(
        logits=[[-19.1194, -0.0893, -11.0154], [-17.3640, -1.8035, -14.0219], [-20.0461, -0.5837, -11.1060]],
        boxes=[[0.4433, 0.5302, 0.8852], [0.5494, 0.2517, 0.0529], [0.4998, 0.5360, 0.9955]],
        found=[("cat", 0.9988), ("cat", 0.9987), ("remote", 0.9982), ("remote", 0.9960), ("couch", 0.9955)],
        is_complete=True,
        box=("remote", (40.1615, 70.8090, 175.5476, 117.9810)),
        zoo="detr_r50",
    ),
    "facebook/detr-resnet-50-panoptic": Expected(
        logits=[[-18.1565, -1.7568, -13.5029], [-16.8888, -1.4138, -14.1028], [-17.5709, -2.5080, -11.8654]],
        boxes=[[0.5344, 0.1789, 0.9285], [0.4420, 0.0572, 0.0875], [0.6630, 0.6887, 0.1017]],
        masks=[[-7.7557, -10.8788, -11.9797], [-11.8880, -16.4328, -17.7450], [-14.7315, -19.7382, -20.3003]],
    ),
    "SenseTime/deformable-detr": Expected(
        logits=[[-9.6644, -4.3434, -5.8707], [-9.7035, -3.8503, -5.0721], [-10.5633, -5.3387, -7.5119]],
        boxes=[[0.8693, 0.2290, 0.2492], [0.3150, 0.5489, 0.5845], [0.5563, 0.7580, 0.8518]],
        found=[("cat", 0.7999), ("cat", 0.7895), ("remote", 0.6332), ("remote", 0.4719), ("couch", 0.4382)],
        is_complete=True,
        box=("cat", (16.4960, 52.8387, 318.2565, 470.7831)),
        zoo="deformable_detr_r50",
    ),
    "SenseTime/deformable-detr-with-box-refine-two-stage": Expected(
        logits=[[-6.7112, -4.3216, -6.3781], [-8.9035, -6.1738, -6.7249], [-6.9314, -4.4736, -6.2303]],
        boxes=[[0.2582, 0.5499, 0.4683], [0.7652, 0.9084, 0.4884], [0.5490, 0.2763, 0.0564]],
        zoo="deformable_detr_r50_two_stage",
    ),
    "SenseTime/deformable-detr-single-scale": Expected(
        logits=[[-9.9051, -4.2541, -6.4852], [-9.6947, -4.0854, -6.8033], [-10.0665, -5.8470, -7.7003]],
        zoo="deformable_detr_r50_single_scale",
    ),
    "PekingU/rtdetr_r50vd": Expected(
        logits=[[-4.6476, -5.0012, -4.9785], [-4.1593, -4.7039, -5.9465], [-4.4375, -4.6584, -6.2352]],
        boxes=[[0.1688, 0.1999, 0.2123], [0.7684, 0.4123, 0.4637], [0.2595, 0.5483, 0.4777]],
        found=[("couch", 0.9703), ("cat", 0.9600), ("cat", 0.9576), ("remote", 0.9507)],
        box=("couch", (0.1377, 0.3782, 640.1307, 476.2109)),
        zoo="rtdetr_r50",
    ),
    "PekingU/rtdetr_v2_r18vd": Expected(
        logits=[[-3.7047, -5.1914, -6.1787], [-4.0108, -9.3449, -5.2047], [-4.1287, -4.7461, -5.8633]],
        boxes=[[0.2582, 0.5497, 0.4764], [0.1684, 0.1985, 0.2120], [0.7665, 0.4146, 0.4669]],
        found=[("cat", 0.9652), ("cat", 0.9599), ("remote", 0.9462), ("couch", 0.8613)],
        box=("cat", (341.14, 25.111, 639.98, 372.89)),
        zoo="rtdetrv2_r18",
    ),
    "ustc-community/dfine-small-coco": Expected(
        logits=[[-3.8098, -4.7725, -5.9945], [-5.2975, -9.4991, -6.1654], [-5.3502, -3.9532, -6.3631]],
        boxes=[[0.7678, 0.4148, 0.4644], [0.1691, 0.1987, 0.2124], [0.2582, 0.5482, 0.4751]],
        found=[("cat", 0.9642), ("remote", 0.9542), ("cat", 0.9536), ("couch", 0.8548)],
        box=("cat", (13.186, 54.130, 317.27, 472.12)),
        zoo="dfine_s_coco",
    ),
    "stevenbucaille/rf-detr-base": Expected(
        logits=[[-7.60410, -4.65943, -10.03144]],
        boxes=[[0.25465, 0.54864, 0.48583]],
        found=[("cat", 0.9596), ("cat", 0.9335), ("remote", 0.8987), ("remote", 0.7271)],
        box=("cat", (7.5101, 54.5667, 318.4421, 472.1259)),
    ),
    "facebook/mask2former-swin-small-coco-instance": Expected(
        logits=[[1.8324, -8.0835, -4.1922], [0.8450, -9.0050, -3.6053], [0.3045, -7.7293, -3.0275]],
        masks=[[-8.7839, -9.0056, -8.8121], [-7.4104, -7.0313, -6.5401], [-6.6105, -6.3427, -6.4675]],
        zoo="mask2former_swin_small_coco_instance",
    ),
    "facebook/maskformer-swin-small-coco": Expected(
        logits=[[1.6512, -5.2572, -3.3519], [0.0362, -5.9025, -2.9313], [0.0001, -7.7630, -5.1263]],
        masks=[[-1.3737, -1.7725, -1.9364], [-1.5977, -1.9868, -2.1524], [-1.5795, -1.9270, -2.0939]],
        zoo="maskformer_swin_small_coco_panoptic",
    ),
    "IDEA-Research/grounding-dino-tiny": Expected(
        text="a cat",
        logits=[[-4.8913, -0.1900, -0.2161], [-4.9653, -0.3719, -0.3950], [-5.9599, -3.3765, -3.3104]],
        boxes=[[0.7674, 0.4136, 0.4572], [0.2566, 0.5463, 0.4760], [0.2585, 0.5442, 0.4641]],
        found=[("a cat", 0.4526), ("a cat", 0.4082)],
        is_complete=True,
        box=("a cat", (344.8143, 23.1796, 637.4004, 373.8295)),
        zoo="grounding_dino_swin_tiny",
    ),
    "openmmlab-community/mm_grounding_dino_tiny_o365v1_goldg_v3det": Expected(
        text="a cat",
        logits=[[-5.1160, -0.2143, -0.2089], [-5.0592, -0.4269, -0.4169], [-4.9087, -1.7608, -1.7372]],
        boxes=[[0.7666, 0.4142, 0.4590], [0.2557, 0.5480, 0.4812], [0.5049, 0.5133, 0.9767]],
        found=[("a cat", 0.4480), ("a cat", 0.3973)],
        is_complete=True,
        box=("a cat", (343.7321, 23.8182, 637.5044, 373.8593)),
        zoo="mm_grounding_dino_swin_tiny_v3det",
    ),
    "google/vit-base-patch16-224": Expected(logits=[-0.2744, 0.8215, -0.0836]),
    "microsoft/swin-tiny-patch4-window7-224": Expected(logits=[-0.0948, -0.6454, -0.0921]),
    "microsoft/swinv2-tiny-patch4-window8-256": Expected(logits=[-0.3947, -0.4306, 0.0026]),
    "microsoft/resnet-50": Expected(logits=[-11.1069, -9.7877, -8.3777]),
}
"""Repository -> outputs that transformers' tests state."""

TIMESFORMER, CLIP = "facebook/timesformer-base-finetuned-k400", "hf-internal-testing/spaghetti-video"
TIMESFORMER_LOGITS = [-0.3016, -0.7713, -0.4205]


@pytest.fixture(scope="session")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "39769.png"
    with urllib.request.urlopen(PHOTO, timeout=60) as response:
        path.write_bytes(response.read())
    return Image.open(path).convert("RGB")


def outputs_of(predictor, source, image, text) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Return vitkit's outputs for the pixels that the library prepares, and pairs of the library's first three classes
    (or a text's tokens) and the same classes in vitkit, which leaves out ids without a class."""
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(source)
    # The model normalizes by itself.
    pixels = processor(images=image, return_tensors="pt", do_rescale=False, do_normalize=False)
    padding_mask = pixels["pixel_mask"] == 0 if "pixel_mask" in pixels else None
    images = pixels["pixel_values"].round().clamp(0, 255).to(torch.uint8)
    with torch.no_grad():
        outputs = predictor.model(images, padding_mask, **({} if text is None else dict(text=[text])))
    if text is not None:
        return outputs, [(i, i) for i in range(3)]
    names = transformers.AutoConfig.from_pretrained(source).id2label
    if len(names) == len(predictor.classes):
        return outputs, [(i, i) for i in range(3)]
    return outputs, [(i, predictor.classes.index(names[i])) for i in range(3) if names[i] in predictor.classes]


def compare(predictor, source, image, expected: Expected, *, atol: float) -> None:
    outputs, columns = outputs_of(predictor, source, image, expected.text)
    logits = outputs["logits" if "logits" in outputs else "pred_logits"][0]
    logits = logits[: len(expected.logits)] if logits.dim() == 2 else logits
    theirs, ours = (list(indices) for indices in zip(*columns))
    torch.testing.assert_close(logits[..., ours], torch.tensor(expected.logits)[..., theirs], atol=atol, rtol=1e-3)
    if expected.boxes is not None:
        boxes = outputs["pred_boxes"][0, : len(expected.boxes), :3]
        torch.testing.assert_close(boxes, torch.tensor(expected.boxes), atol=atol, rtol=1e-3)
    if expected.masks is not None:
        masks = outputs["pred_masks"][0, 0, :3, :3]
        torch.testing.assert_close(masks, torch.tensor(expected.masks), atol=atol, rtol=1e-3)


@needs_hub
@pytest.mark.parametrize("name", EXPECTED)
def test_outputs_are_those_that_the_librarys_tests_state(name, photo):
    compare(vitkit.load(f"hf:{name}"), name, photo, EXPECTED[name], atol=2e-3)


def logits_of_clip(folder, frames, size) -> Tensor:
    """Return vitkit's logits of a clip, prepared and normalized as the library's test does, not as the folder says."""
    transformers = pytest.importorskip("transformers")
    processor = transformers.VideoMAEImageProcessor(**size, do_rescale=False, do_normalize=False)
    pixels = processor(frames, return_tensors="pt")["pixel_values"]
    model = vitkit.load(folder).model
    model.pixel_mean = model.pixel_std = (0.5, 0.5, 0.5)
    with torch.no_grad():
        return model(pixels.round().clamp(0, 255).to(torch.uint8).transpose(1, 2))["logits"][0]


@needs_hub
def test_logits_of_a_clip_are_those_that_the_librarys_tests_state():
    hub = pytest.importorskip("huggingface_hub")
    frames = np.load(hub.hf_hub_download(CLIP, "eating_spaghetti.npy", repo_type="dataset"))
    logits = logits_of_clip(f"hf:{TIMESFORMER}", list(frames[:8]), {})
    torch.testing.assert_close(logits[:3], torch.tensor(TIMESFORMER_LOGITS), atol=2e-3, rtol=1e-3)


def test_comparison_of_clips_on_random_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = build_theirs(transformers, "timesformer_divided")
    theirs.save_pretrained(tmp_path)
    size = dict(size=dict(shortest_edge=32), crop_size=dict(height=32, width=32))
    processor = transformers.VideoMAEImageProcessor(**size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    frames = list(np.random.default_rng(0).integers(0, 256, (theirs.config.num_frames, 40, 60, 3), dtype=np.uint8))
    with torch.no_grad():
        expected = theirs(**processor(frames, return_tensors="pt")).logits[0]
    torch.testing.assert_close(logits_of_clip(str(tmp_path), frames, size), expected, atol=2e-4, rtol=1e-3)


@needs_hub
@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if expected.found])
def test_detections_are_those_that_the_librarys_tests_state(name, photo):
    """With vitkit's own preparation of the photo, whose resizing may differ by a rounding."""
    expected = EXPECTED[name]
    options = dict(threshold=0.3)
    if expected.text is not None:
        options = dict(threshold=0.35, text=expected.text, text_threshold=0.3)
    prediction = vitkit.load(f"hf:{name}")(photo, **options)
    names = ["couch" if found == "sofa" else found for found in prediction.names]  # RT-DETR's repository says sofa
    if expected.is_complete:
        assert len(names) == len(expected.found)
    num = len(expected.found)
    assert sorted(names[:num]) == sorted(found for found, _ in expected.found)
    scores = sorted((score for _, score in expected.found), reverse=True)
    assert prediction.scores[:num].tolist() == pytest.approx(scores, abs=0.02)
    label, box = expected.box
    same = torch.tensor([found == label for found in names])
    assert box_iou(torch.tensor([box]), prediction.boxes[same]).max() > 0.97


@needs_hub
@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if expected.zoo])
def test_ap_on_coco_is_the_published_one(name):
    if "VITKIT_COCO" not in os.environ:
        pytest.skip("set VITKIT_COCO to a folder with COCO 2017")
    published = model_zoo.index()[EXPECTED[name].zoo]["published"]
    metrics = vitkit.test(f"hf:{name}", data=dict(root=os.environ["VITKIT_COCO"])).metrics
    keys = {"box AP": "bbox/AP", "COCO zero-shot box AP": "bbox/AP", "mask AP": "segm/AP", "PQ": "PQ"}
    for title, key in keys.items():
        if key in metrics and title in published:
            assert 100 * metrics[key] == pytest.approx(published[title], abs=0.2), title  # published with one decimal
    assert {"bbox/AP", "segm/AP", "PQ"} & set(metrics)


@pytest.mark.parametrize("mm", [False, True])
def test_comparison_of_text_prompted_models_on_random_weights(mm, tmp_path, shared_data):
    transformers = pytest.importorskip("transformers")
    theirs = library_grounding(transformers, mm=mm)
    theirs.save_pretrained(tmp_path)
    processor = transformers.GroundingDinoImageProcessor(size=dict(shortest_edge=128, longest_edge=200))
    processor.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(bert_tokenizer())
    image = Image.open(next(shared_data.glob("photos/*.jpg"))).convert("RGB")
    tokens = torch.tensor([[101, BERT_TOKENS["a"], BERT_TOKENS["cat"], 1012, 102]])
    with torch.no_grad():
        outputs = theirs(**processor(images=image, return_tensors="pt"), input_ids=tokens)
    expected = Expected(outputs.logits[0, :3, :3].tolist(), outputs.pred_boxes[0, :3, :3].tolist(), text="a cat")
    compare(vitkit.load(Path(tmp_path)), str(tmp_path), image, expected, atol=5e-4)


PROCESSORS = {
    "detr": "DetrImageProcessor",
    "detr_masks": "DetrImageProcessor",
    "deformable_detr_two_stage": "DeformableDetrImageProcessor",
    "rt_detr": "RTDetrImageProcessor",
    "d_fine": "RTDetrImageProcessor",
    "rf_detr": "DeformableDetrImageProcessor",
    "mask2former_swin": "Mask2FormerImageProcessor",
    "maskformer_swin": "MaskFormerImageProcessor",
    "swin": "ViTImageProcessor",
    "resnet": "ConvNextImageProcessor",
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_comparison_itself_on_random_weights(kind, tmp_path, shared_data):
    """What needs the hub above, on small models here: the library's outputs, by its own preparation of a photo."""
    transformers = pytest.importorskip("transformers")
    theirs = build_theirs(transformers, kind)
    theirs.save_pretrained(tmp_path)
    processor_class = getattr(transformers, PROCESSORS[kind])
    size = dict(height=128, width=128) if kind in ("rt_detr", "d_fine", "rf_detr", "swin") else dict(shortest_edge=128)
    if ("detr" in kind and kind not in ("rt_detr", "rf_detr")) or "former" in kind:
        size["longest_edge"] = 200
    processor = processor_class(size=size)
    processor.save_pretrained(tmp_path)
    image = Image.open(next(shared_data.glob("photos/*.jpg"))).convert("RGB")
    with torch.no_grad():
        outputs = theirs(**processor(images=image, return_tensors="pt"))
    if "class_queries_logits" in outputs:
        expected = Expected(
            logits=outputs.class_queries_logits[0, :3, :3].tolist(),
            masks=outputs.masks_queries_logits[0, 0, :3, :3].tolist(),
        )
    elif "pred_boxes" in outputs:
        expected = Expected(outputs.logits[0, :3, :3].tolist(), outputs.pred_boxes[0, :3, :3].tolist())
        if "pred_masks" in outputs:
            expected.masks = outputs.pred_masks[0, 0, :3, :3].tolist()
    else:
        expected = Expected(outputs.logits[0, :3].tolist())
    predictor = vitkit.load(Path(tmp_path), things=[True] * 3 if "former" in kind or "masks" in kind else None)
    compare(predictor, str(tmp_path), image, expected, atol=2e-4)
    wrong = Expected((1.01 * torch.tensor(expected.logits) + 0.1).tolist())
    with pytest.raises(AssertionError):
        compare(predictor, str(tmp_path), image, wrong, atol=2e-3)
