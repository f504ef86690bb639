"""What brings a detector on blood cells furthest in fifteen minutes of a core that has only AVX2, from random weights.

The recipe is configs/bccd/small_first.py. Arms whose steps cost more or less have fewer or more epochs.

Run:  vitkit ablate first_minutes_bccd data.root=DIR --seeds 42 43
"""

from vitkit.configs.bccd.dino_r18 import config as dino_r18
from vitkit.configs.bccd.small_first import config as small_first


def ablation():
    first, large = small_first()["data"]["train"]["transforms"]["transforms"]
    all_large = {"data.train.transforms": dino_r18()["data"]["train"]["transforms"]}
    without_mosaics = dict(type="TransformsByEpoch", until_shares=[0.6], transforms=[first["transforms"], large])
    one_to_many = [*dino_r18()["model"]["training_queries"], dict(type="OneToManyQueries", num_queries=80, repeats=4)]
    return dict(
        base="bccd/small_first",
        metrics=["bbox/AP", "bbox/AP50"],
        evaluations=1,
        arms={
            "small images first": {},
            "small images first, sampling as in the papers": {"model.head.rounds_padding": True},
            "224 pixels from the start": {**all_large, "train.epochs": 14},
            "small images first, Muon": {"optimizer.type": "Muon", "train.epochs": 17},
            "224 pixels from the start, Muon": {**all_large, "optimizer.type": "Muon", "train.epochs": 13},
            "small images first, no mosaics": {"data.train.transforms": without_mosaics, "train.epochs": 20},
            "small images first, 40 queries": {"model.num_queries": 40},
            "small images first, no denoising": {"model.training_queries": []},
            "small images first, also one-to-many": {"model.training_queries": one_to_many, "train.epochs": 18},
        },
    )
