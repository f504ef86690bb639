# %% [markdown]
# # Captions that look
#
# Show, Attend and Tell (Xu et al. 2015) writes a caption word by word, and looks at the picture anew for each word.
# This notebook trains it twice on vitkit's synthetic world, once with soft and once with hard attention, and draws
# where it looked.

# %%
from pathlib import Path

import torch

import vitkit
from vitkit.inference.text_attention import caption_attention, draw_beam_tree, word_attention
from vitkit.visualization.attention import draw_word_attention
from vitkit.visualization.notebooks import show
from vitkit.visualization.predictions import save_titled
from vitkit.visualization.text import draw_expected

out = Path("pictures/captions")

# %% [markdown]
# ## Pictures with a known right answer
#
# A scene of the synthetic world is drawn from its number alone, with its boxes, masks and a caption, so nothing need be
# downloaded. The captions name the shapes from left to right and then the ground.

# %%
WORLD = dict(type="ShapesCaptions", image_size=32, min_objects=2, max_objects=2, min_size=0.4, max_size=0.55)
val_set = vitkit.build_dataset(dict(WORLD, num_images=100, split="val"))
images = [val_set.load_image(index) for index in range(8)]
captions = [val_set.references(index)[0] for index in range(8)]
save_titled(images, [(caption, "black", "") for caption in captions], out / "world.png")
show(out / "world.png")

# %% [markdown]
# ## The model
#
# A convolutional network turns the picture into a map of features, one for each of $L$ locations: the annotations $a_1,
# \dots, a_L$. An LSTM with state $h_{t-1}$ scores each of them with the additive score of notebook 1, and a softmax
# makes weights of the scores,
#
# $$e_{ti} = v^\top \tanh(W h_{t-1} + U a_i), \qquad \alpha_{ti} = \frac{\exp e_{ti}}{\sum_{k=1}^{L} \exp e_{tk}}.$$
#
# **Soft attention** reads the expected annotation. That is differentiable, so it is trained by backpropagation:
#
# $$z_t = \beta_t \sum_{i=1}^{L} \alpha_{ti} a_i, \qquad \beta_t = \sigma(f_\beta(h_{t-1})).$$
#
# The gate $\beta_t$ lets a word such as *of* or *ground* do with less of the picture. A penalty asks that each location
# be looked at about once in a caption, $\lambda \sum_i \bigl(1 - \sum_t \alpha_{ti}\bigr)^2$.
#
# **Hard attention** reads one location $s_t$, drawn with the probabilities $\alpha_t$. A draw has no gradient, so the
# weights learn from a reward, the caption's log probability $r = \log p(y \mid s, a)$ beyond its running average $b$:
#
# $$\nabla_\theta \approx \nabla_\theta \log p(y \mid s, a)
# + \lambda_r (r - b)\, \nabla_\theta \log p(s \mid a) + \lambda_e \nabla_\theta H[s].$$
#
# The model attends to a map of 8 x 8 locations, and starts from random weights, the convolutions as well.

# %%
MODEL = dict(
    type="ShowAttendTell",
    backbone=dict(type="ResNet", depth=18, norm="bn", out_features=["res2"], pretrained=False),
    freeze_backbone=False,
    d_embedding=64,
    d_model=128,
    d_attention=64,
    dropout=0.0,
    decoding=dict(method="greedy", max_length=20),
)


def train_captioner(attention, *, epochs, lr, init=None, **criterion):
    """Train Show, Attend and Tell with soft or hard attention."""
    run = vitkit.train(
        "quickstart/captioning",
        init=init,
        model=dict(MODEL, attention=attention),
        criterion=dict(type="CaptionLoss", doubly_stochastic=0.1, **criterion),
        data=dict(train=dict(WORLD, num_images=4000), val=dict(WORLD, num_images=100, split="val"), images_per_gpu=32),
        optimizer=dict(lr=lr),
        train=dict(epochs=epochs, eval_every=epochs, reference_batch_size=32),
    )
    print(attention, {name: round(run.metrics[name], 3) for name in ("BLEU-1", "BLEU-4", "CIDEr-D")})
    return run


soft_run = train_captioner("soft", epochs=2, lr=2e-3)
show(soft_run.path / "predictions.png")

# %% [markdown]
# Above each picture stands what it wrote, below what is right. After a few minutes' worth of pictures it has learned
# the grammar, the grounds, the colours and their order from left to right; shapes it mostly guesses still, as the
# convolutions need many more pictures to tell a star from a cross. (`configs/quickstart/captioning.py` takes a quarter
# of an hour and writes three of four captions without a mistake.)
#
# ## Soft attention
#
# A caption with the map of each word; bright is where it was read from, and the number is the largest weight. Colours
# are read at the shapes, sharply, the left one first. Words such as *of* need nothing of the picture, and their weights
# are spread.

# %%
soft = soft_run.load()
image = images[0]
print(soft(image))
inputs = soft.prepare([image]).inputs
words, weights = word_attention(soft.model, inputs)
draw_word_attention(image, words, weights, out / "soft.png")
show(out / "soft.png")

# %% [markdown]
# What did it expect at each word? It is sure of colours and grammar, and of the shapes it says itself how little it
# knows.

# %%
attention = caption_attention(soft.model, inputs)
draw_expected(attention.expected, out / "next_words.png", title="The most probable words after each")
show(out / "next_words.png")

# %% [markdown]
# ## Hard attention
#
# The same network reads a single location for each word. It starts from the weights of the soft one, which already know
# where to look, and learns to do with one location. In training half of the pictures still get the expectation, as in
# the paper, which keeps the variance of the gradient in bounds. Evaluated, it reads the location of the largest weight,
# and the picture shows just that one.

# %%
hard_run = train_captioner("hard", epochs=1, lr=5e-4, init=soft_run.weights, reinforce=0.1, entropy=0.002)
hard = hard_run.load()
print(hard(image))
words, weights = word_attention(hard.model, hard.prepare([image]).inputs)
assert ((weights > 0).sum((1, 2)) == 1).all()  # one location for each word
draw_word_attention(image, words, weights, out / "hard.png")
show(out / "hard.png")

# %% [markdown]
# How far the soft maps are spread can be said in a number: the entropy of the weights, as the number of locations that
# would give it if they shared the weight equally, $\exp\bigl(-\sum_i \alpha_{ti} \log \alpha_{ti}\bigr)$. Hard
# attention has 1 by construction.

# %%
words, weights = word_attention(soft.model, inputs)
spread = (-(weights * weights.clamp(min=1e-12).log()).sum((1, 2))).exp()
print("  ".join(f"{word} {count:.1f}" for word, count in zip(words, spread.tolist())))

# %% [markdown]
# ## Beams
#
# A captioner decodes as a translator does. The tree shows where it hesitates.

# %%
torch.manual_seed(0)
draw_beam_tree(soft.model, soft.model.vocabulary, inputs, out / "beams.png", beams=3)
show(out / "beams.png")

# %% [markdown]
# ## Where to go from here
#
# - `vitkit caption configs/quickstart/captioning.py runs/captioning/best.pth pictures/ --attention drawn` captions a
#   folder of pictures, and draws each as above.
# - `configs/caption_sat_soft_flickr8k.py` and `caption_sat_hard_flickr8k.py` are the paper's models on photographs;
#   `configs/caption_transformer_coco.py` replaces the LSTM by a Transformer.
# - Notebook 4 asks what backbones attend to by themselves.
