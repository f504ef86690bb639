"""Show, Attend and Tell (Xu et al. 2015, https://arxiv.org/abs/1502.03044) on a few images, from ImageNet weights.

caption_sat_soft_flickr8k for a part of Flickr8k (741 images): the backbone is frozen, so that its maps can be computed
once (data.cache_features=features), and the remaining training takes minutes.

Run:  python tools/train.py configs/transfer/captions.py data.root=DIR    (DIR holds images/ and annotations/)
      From random weights: model.backbone.pretrained=false. From Keras's: see configs/parts/resnet.py.
Here: BLEU-1 0.513, BLEU-4 0.088, ROUGE-L 0.351, CIDEr-D 0.169 on 108 other images, after 480 steps at 160 pixels with
      Keras's weights (11 min of one core, torch 2.14.1; the maps took 0.7 min); from random weights 0.484, 0.078,
      0.355, 0.149, with the maps of a run of two steps, from which training starts (--init RUN).
"""

from vitkit.configs.parts.resnet import resnet50_for_transfer
from vitkit.configs.show_attend_tell import config as show_attend_tell


def config():
    cfg = show_attend_tell()
    cfg["model"]["backbone"] = resnet50_for_transfer(out_features=["res4"])
    cfg["train"].update(epochs=20, eval_every=5)
    return cfg
