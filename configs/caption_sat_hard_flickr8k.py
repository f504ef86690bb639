"""Show, Attend and Tell with hard attention on Flickr8k (Xu et al. 2015, https://arxiv.org/abs/1502.03044).

As with soft attention, but each word is written from one location, which is sampled in training and afterwards is the
most probable one. The weights of reward and entropy are this repository's, as the paper leaves them to a search.

Run:       python tools/train.py configs/caption_sat_hard_flickr8k.py data.root=data/flickr8k
Reference: BLEU-1 67, BLEU-4 21.3, METEOR 20.30 (paper, table 1, test split, VGG).
Here:      not yet run on all of Flickr8k; on a part of it, see caption_sat_soft_flickr8k.py.
"""

from vitkit.configs.caption_sat_soft_flickr8k import config as soft


def config():
    result = soft(attention="hard")
    result["criterion"] |= dict(reinforce=0.1, entropy=0.002)
    return result
