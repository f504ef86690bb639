"""Show, Attend and Tell on Flickr8k (Xu et al. 2015, https://arxiv.org/abs/1502.03044).

The backbone is a ResNet-50 instead of the paper's VGG, pretrained on ImageNet and frozen; its stride of 16 gives the
paper's 14 x 14 locations. The optimizer is Adam with twice the learning rate of the paper's own code (2e-4). With hard
attention, each word is written from one location, which is sampled in training and afterwards is the most probable one;
the weights of reward and entropy are this repository's, as the paper leaves them to a search.

Run:       python tools/train.py caption_sat_soft_flickr8k data.root=data/flickr8k
           data.cache_features=features data.train.transforms=ClassificationEvalTransforms computes features once.
Reference: the paper's table 1, test split, VGG.
Here:      not yet run on all of Flickr8k. With 741 of its images and a ResNet-18 from random weights, figures are
           low: after five epochs at 96 pixels BLEU-1 0.430, BLEU-4 0.067 and CIDEr-D 0.04 on 108 images, with hard
           attention 0.454, 0.071 and 0.05.
"""

from typing import Literal

from vitkit.configs.parts.flickr8k import flickr8k

VARIANTS = {
    "caption_sat_soft_flickr8k": (dict(attention="soft"), "BLEU-1 67, BLEU-4 19.5, METEOR 18.93"),
    "caption_sat_hard_flickr8k": (dict(attention="hard"), "BLEU-1 67, BLEU-4 21.3, METEOR 20.30"),
}
"""Name -> arguments of `config`, and what is published."""


def config(attention: Literal["soft", "hard"] = "soft"):
    cfg = dict(
        model=dict(
            type="ShowAttendTell", attention=attention, freeze_backbone=True,
            backbone=dict(type="resnet50", pretrained=True, out_features=["res4"]),
            decoding=dict(method="beam", beams=3, max_length=30),
        ),
        criterion=dict(type="CaptionLoss", doubly_stochastic=1.0),
        data=flickr8k(),
        optimizer=dict(type="AdamW", lr=4e-4, weight_decay=0.0),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="CaptionEvaluator"),
        # An epoch shows one of five captions of each image: these are ten epochs of captions.
        train=dict(epochs=50, clip_grad_norm=5.0, reference_batch_size=32, best_metric="CIDEr-D", eval_every=5),
    )  # fmt: skip
    if attention == "hard":
        cfg["criterion"].update(reinforce=0.1, entropy=0.002)
    return cfg
