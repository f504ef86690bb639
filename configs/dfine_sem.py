"""D-FINE-seg's semantic form on Cityscapes (2026, https://arxiv.org/abs/2602.23043): D-FINE's encoder and D-FINE-seg's
mask features, whose pixels are classified without queries.

The original trains with its own mosaics, on whole images, by default with Muon and Adan; the recipe here is its rates
for AdamW with crops of images at half to one and a half times their size. It starts from weights of the instance form,
of which backbone, encoder and mask features are taken.

Run:       torchrun --nproc-per-node 8 tools/train.py dfine_sem_s_cityscapes --init-partial dfine_seg_s_coco
           ADE20K: dfine_sem:size=s,data=ade20k. CamVid: dfine_sem:size=s,data=camvid; camvid/dfine_sem is for minutes.
           Your own label images, in DIR/images/train, DIR/labels/train and likewise val, whose classes FILE lists:
           dfine_sem:size=s,data=camvid data.root=DIR data.{train,val}.classes=FILE data.{train,val}.ignore=[255]; see
           vitkit/data/formats/README.md, "Label images".
Reference: the original README, at 1024x2048, one scale; parameters include the auxiliary classifier, which is used only
           in training. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.dfine import NORMS_AND_BIASES, adamw
from vitkit.configs.dfine_seg import EPOCHS, TRAINING, dfine_seg_model
from vitkit.configs.parts.ade20k import SEMANTIC as ADE20K
from vitkit.configs.parts.ade20k import ade20k_semantic
from vitkit.configs.parts.camvid import CLASSES as CAMVID_CLASSES
from vitkit.configs.parts.camvid import camvid
from vitkit.configs.parts.cityscapes import SEMANTIC as CITYSCAPES
from vitkit.configs.parts.cityscapes import cityscapes_semantic

VARIANTS = {
    "dfine_sem_n_cityscapes": (dict(size="n"), "77.99 mIoU; 3.36 M parameters"),
    "dfine_sem_s_cityscapes": (dict(size="s"), "81.12 mIoU; 7.99 M parameters"),
    "dfine_sem_m_cityscapes": (dict(size="m"), "81.41 mIoU; 15.95 M parameters"),
    "dfine_sem_l_cityscapes": (dict(size="l"), "83.80 mIoU; 24.97 M parameters"),
    "dfine_sem_x_cityscapes": (dict(size="x"), "84.84 mIoU; 56.3 M parameters"),
}
"""Name -> arguments of `config`, and what is published."""


def config(
    size: Literal["n", "s", "m", "l", "x"] = "s", data: Literal["cityscapes", "ade20k", "camvid"] = "cityscapes"
):
    return dict(
        model=dfine_sem_model(size) | _num_classes(data),
        criterion=dict(type="PerPixelCriterion", dice_weight=1.0, aux_weight=0.4),
        data=_data(data),
        optimizer=adamw(TRAINING[size], no_weight_decay=NORMS_AND_BIASES),
        schedule=dict(type="CosineLR", warmup_steps=500),
        evaluator=dict(type="SemanticEvaluator"),
        train=dict(
            epochs=EPOCHS, precision="auto", clip_grad_norm=0.1, seed=42, reference_batch_size=8, sync_batch_norm=True,
            ema_decay=0.9998, ema_ramp_steps=1000, best_metric="mIoU",
        ),
    )  # fmt: skip


def dfine_sem_model(size):
    model = dfine_seg_model(size)
    channels = model["head"]["masks"]["channels"]
    return dict(
        type="PerPixelClassification", backbone=model["backbone"], neck=model["neck"],
        head=dict(type="DFINESegHead", mask_channels=channels, channels=128, dropout=0.1),
    )  # fmt: skip


def _num_classes(data):
    return dict(cityscapes=CITYSCAPES, ade20k=ADE20K, camvid=dict(num_classes=len(CAMVID_CLASSES)))[data]


def _data(name):
    if name == "ade20k":
        return ade20k_semantic(images_per_gpu=4, size=512)
    if name == "camvid":
        return camvid(images_per_gpu=4)
    data = cityscapes_semantic(images_per_gpu=1, crop_size=(1024, 2048))
    data["train"]["transforms"]["short_sides"] = [1024 * tenths // 10 for tenths in range(5, 16)]
    return data
