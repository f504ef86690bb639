"""A small DINO on blood cells (https://github.com/Shenggan/BCCD_Dataset), from ImageNet weights.

configs/transfer/bccd.py with the additions of DINO (contrastive denoising, mixed query selection, look forward twice),
and half the batch size for twice the steps.

Run:  python tools/train.py configs/bccd/dino.py data.root=DIR    (DIR holds images/ and annotations/)
      From Keras's weights, as the figure: see configs/parts/resnet.py.
Here: AP 0.595, AP50 0.855, AP75 0.685 (seed 42) on the 87 validation images, which also chose the best epoch, the last;
      67 min of one core of an AMD EPYC with AVX-512, bf16; 5150 steps. After 10, 20, 30 and 40 of the 50 epochs: AP
      0.428, 0.557, 0.584, 0.594.
      Measured before the head was DINO's in every detail: without the norm of decoder outputs, with Deformable DETR's
      positions (temperature 10000, offset -0.5).
"""

from vitkit.configs.transfer.bccd import config as transfer


def config():
    cfg = transfer()
    model = cfg["model"]
    model["num_queries"] = 80
    model["backbone"]["frozen_stages"] = 1
    model["type"] = "DINO"
    model["num_detections"] = 100
    model["head"] = dict(
        type="DINOHead", d_model=128, num_heads=8, d_ffn=512, num_encoder_layers=1, num_decoder_layers=3,
        share_heads=False,
    )  # fmt: skip
    model["training_queries"] = [dict(type="BoxDenoising", num_queries=40)]
    cfg["data"]["images_per_gpu"] = 2
    cfg["optimizer"].update(lr=2e-4, backbone_lr=5e-5)
    cfg["schedule"]["warmup_steps"] = 100
    cfg["train"].update(precision="auto", epochs=50, reference_batch_size=2)
    return cfg
