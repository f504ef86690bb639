"""A small DINO on the synthetic world: no download, minutes on a CPU.

One map of stride 8, one encoder and two decoder layers. From random weights, objects are found long before their shapes
are told apart; so the classes' weight is 8 times DINO's. After 400 steps with a learning rate of 1e-3 AP50 is 0.29 with
weight 1, 0.53 with 3, 0.69 with 8; with 2e-3 it is 0.73, and 0.41 without denoising (one seed, schedules of
two or three epochs, with a wider backbone).

Run:  python tools/train.py configs/quickstart/dino.py
Here: AP50 0.974 and AP 0.780 for seed 42; 5.9 processor minutes of an AMD EPYC, one thread.
      These weights are in the package: `vitkit predict shapes_dino --input image.png`.
"""

from vitkit.configs.quickstart.deformable_detr import config as deformable_detr


def config():
    cfg = deformable_detr()
    cfg["model"].update(type="DINO", num_queries=10)
    cfg["model"]["backbone"].update(base_channels=32, out_features=["res3"])
    cfg["model"]["neck"].update(num_levels=1, out_channels=96)
    cfg["model"]["head"] = dict(
        type="DINOHead", d_model=96, num_heads=8, d_ffn=384, dropout=0.0, num_encoder_layers=1, num_decoder_layers=2,
    )  # fmt: skip
    cfg["model"]["training_queries"] = [dict(type="BoxDenoising", num_queries=20)]
    cfg["criterion"]["weights"]["labels"] = 8.0
    cfg["optimizer"]["lr"] = 2e-3
    cfg["train"]["epochs"] = 5
    return cfg
