"""Backbones that learn from blood cells without labels, for model.backbone.pretrained=FOLDER of a detector.

A ResNet-18 up to res4 learns from the features of an ImageNet ResNet-50 ("distilled") or from itself ("self_distilled",
DINO), a small ViT by reconstruction ("mae"). They see the 205 training photos only, in crops of 128 pixels.

Run:  vitkit train bccd/pretraining:method=mae data.root=DIR --run-dir runs/pretrained/mae
      The teacher's weights are runs/pretrained/resnet50.pth, Keras's (see configs/parts/resnet.py).
Here: distilled, 55 min of one core of an AMD EPYC with AVX-512, the cosine with the teacher's standardized features on
      the validation photos is 0.63 at each location and 0.70 of each image. "mae", as long: the loss is 0.30 (0.67
      after 105 of 4760 steps). "self_distilled", 58 min: the teacher's entropy is 6.3, that of the mean 6.7
      (ln 1024 = 6.9), and features have a spread of 0.23 and an effective rank of 45; it was tried with five other
      recipes, for 12 to 290 of its 680 steps, to find one that does not collapse (configs/pretrain/README.md); else
      nothing is tuned. What they are worth to a detector: model_zoo/ablations/few_labels.md.
"""

from typing import Literal

from vitkit.configs.parts.resnet import resnet50_for_transfer
from vitkit.configs.pretrain.self_distillation import config as self_distillation

WEIGHTS = "runs/pretrained"
RESNET18 = dict(type="ResNet", depth=18, norm="bn", out_features=["res3", "res4"], pretrained=False)
RESNET50 = resnet50_for_transfer(norm="frozen_bn")
RESNET50.update(
    pretrained=f"{WEIGHTS}/resnet50.pth", stride_in_1x1=True, pixel_mean=[0.48502, 0.45796, 0.40760],
)  # fmt: skip
VIT = dict(
    type="ViT", patch_size=8, d_model=192, depth=6, num_heads=3, image_size=128, positions="sincos", pretrained=False
)
SIZE = 128
# Photos in a step, and the epochs of about an hour of a busy core, by the first steps of each.
BATCHES = {"distilled": (16, 450), "self_distilled": (64, 170), "mae": (32, 680)}


def config(method: Literal["distilled", "self_distilled", "mae"] = "distilled"):
    batch, epochs = BATCHES[method]
    photos = dict(type="CocoDetection", images="{root}/images", bad_boxes="drop")
    train, val = (
        photos | dict(annotations=f"{{root}}/annotations/instances_{split}.json") for split in ("train", "val")
    )
    crops = dict(type="ClassificationTrainTransforms", size=SIZE, scale=[0.25, 1.0])
    cfg = dict(
        data=dict(
            root="data/bccd", images_per_gpu=batch, val_images_per_gpu=16, num_workers=0,
            train=dict(type="UnlabeledImages", source=train, transforms=crops),
            val=dict(
                type="UnlabeledImages", source=val, transforms=dict(type="ClassificationEvalTransforms", size=SIZE)
            ),
        ),
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.04, no_weight_decay=["vectors"]),
        schedule=dict(type="CosineLR", warmup_steps=20),
        evaluator=dict(type="FeatureStatistics"),
        train=dict(
            epochs=epochs, reference_batch_size=batch, precision="auto", channels_last=True, eval_every=100,
            best_metric="rank", log_every=10,
        ),
    )  # fmt: skip
    if method == "distilled":
        crops["color_jitter"] = 0.2
        teacher = RESNET50 | dict(out_features=["res4"])
        cfg["model"] = dict(type="FeatureDistillation", backbone=RESNET18, teacher=teacher)
        cfg["criterion"] = dict(type="FeatureDistillationLoss")
    elif method == "mae":
        crops["interpolation"] = "bicubic"
        cfg["model"] = dict(type="MAE", backbone=VIT, decoder_d_model=128, decoder_depth=1, decoder_num_heads=4)
        cfg["criterion"] = dict(type="ReconstructionLoss")
        cfg["optimizer"].update(betas=[0.9, 0.95], weight_decay=0.05)
    else:
        cfg["optimizer"]["lr"] = 2.5e-4
        published = self_distillation(momentum=0.99, warmup_epochs=epochs // 10)
        cfg["data"]["train"]["transforms"] = dict(
            type="MultiCrop", size=SIZE, small_size=64, num_small=4, scale=[0.4, 1.0], small_scale=[0.1, 0.4]
        )
        cfg["model"] = published["model"] | dict(backbone=RESNET18, num_prototypes=1024, batch_norm=True)
        cfg["criterion"] = published["criterion"]
        # Without the norms, all outputs are uniform after 40 steps, and by the published temperature, 0.04, after 110.
        (hook,) = published["train"]["hooks"]
        cfg["train"]["hooks"] = [hook | dict(teacher_temperature=0.02, warmup_teacher_temperature=0.02)]
    return cfg
