# %% [markdown]
# # Captions with attention
#
# Show, Attend and Tell (Xu et al. 2015) writes a caption word by word, and attends to the image again for each word.
# This notebook trains the model twice on vitkit's synthetic images, once with soft and once with hard attention, on the
# backbone of a captioner that comes with vitkit, and draws the attention maps.

# %%
from pathlib import Path

import torch

import vitkit
from vitkit.apps.explanations.drawing import draw_word_attention
from vitkit.apps.explanations.regions import attention_ratio
from vitkit.apps.explanations.text import caption_attention, draw_beam_tree, word_attention
from vitkit.apps.explanations.text_drawing import draw_expected
from vitkit.apps.visualization.canvas import save_grid
from vitkit.apps.visualization.notebooks import show
from vitkit.data.synthetic.world import COLORS, THINGS

out = Path("figures/captions")

# %% [markdown]
# ## Synthetic images with captions
#
# Each synthetic scene is generated from its index, with boxes, masks and a caption, so nothing needs to be downloaded.
# The captions name the shapes from left to right, with how each lies to the next, and then the background.

# %%
WORLD = dict(type="ShapesCaptions", image_size=64, min_objects=2, max_objects=2)
val_set = vitkit.build_dataset(dict(WORLD, num_images=100, split="val"))
images = [val_set.load_image(index) for index in range(8)]
save_grid(images, [val_set.references(index)[0] for index in range(8)], out / "world.png")
show(out / "world.png")

# %% [markdown]
# ## A trained captioner
#
# `vitkit.load("shapes_captioner")` is part of the package: a small ResNet and a Transformer, trained on 32 000 such
# images for ten minutes (`configs/quickstart/captioning.py`). Its captions of the images above, and how many of the 100
# captions are right to the word (of its validation images, half of which have one shape, 0.91 are):

# %%
packaged = vitkit.load("shapes_captioner")
written = [packaged(val_set.load_image(index)).text for index in range(len(val_set))]
mistakes = [index for index, text in enumerate(written) if text != val_set.references(index)[0]]
save_grid(images, written[:8], out / "packaged.png")
show(out / "packaged.png")
print(f"{len(val_set) - len(mistakes)} of {len(val_set)} captions are exact; the first mistakes:")
for index in mistakes[:3]:
    print(f"  image {index}: {written[index]}, instead of {val_set.references(index)[0]}")
assert len(mistakes) <= 25

# %% [markdown]
# ## The model
#
# A convolutional network computes a feature vector for each of $L$ locations, which the paper calls annotations $a_1,
# \dots, a_L$. An LSTM with state $h_{t-1}$ scores each of them with the additive score of notebook 1, and a softmax
# turns the scores into weights,
#
# $$e_{ti} = v^\top \tanh(W h_{t-1} + U a_i), \qquad \alpha_{ti} = \frac{\exp e_{ti}}{\sum_{k=1}^{L} \exp e_{tk}}.$$
#
# **Soft attention** reads the expected annotation, which is differentiable and can be trained by backpropagation:
#
# $$z_t = \beta_t \sum_{i=1}^{L} \alpha_{ti} a_i, \qquad \beta_t = \sigma(f_\beta(h_{t-1})).$$
#
# The gate $\beta_t$ reduces the image's influence on words such as *of* or *ground*. A penalty encourages the weights
# of each location to sum to about one over the caption, $\lambda \sum_i \bigl(1 - \sum_t \alpha_{ti}\bigr)^2$.
#
# **Hard attention** reads one location $s_t$, sampled with probabilities $\alpha_t$. Sampling has no gradient, so the
# attention weights are trained with a reward, the log probability $r = \log p(y \mid s, a)$ of the caption minus its
# running average $b$:
#
# $$\nabla_\theta \approx \nabla_\theta \log p(y \mid s, a)
# + \lambda_r (r - b)\, \nabla_\theta \log p(s \mid a) + \lambda_e \nabla_\theta H[s].$$
#
# The paper's convolutional network was trained on ImageNet and is not trained further. Here it is the packaged
# captioner's, which can tell the shapes apart; training one takes far longer than the rest of this notebook. Its map
# has 8 x 8 locations. All other weights are initialized randomly.

# %%
torch.save(packaged.model.backbone.state_dict(), out / "backbone.pth")
MODEL = dict(
    type="ShowAttendTell",
    backbone=dict(
        type="resnet18", base_channels=48, out_features=["res3"], pretrained=str((out / "backbone.pth").resolve())
    ),
    freeze_backbone=True,
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
        data=dict(train=dict(WORLD, num_images=6000), val=dict(WORLD, num_images=100, split="val"), images_per_gpu=32),
        optimizer=dict(lr=lr),
        train=dict(epochs=epochs, eval_every=epochs, reference_batch_size=32),
    )
    print(attention, {name: round(run.metrics[name], 3) for name in ("exact_match", "BLEU-1", "BLEU-4", "CIDEr-D")})
    return run


soft_run = train_captioner("soft", epochs=3, lr=4e-3)
assert soft_run.metrics["exact_match"] > 0.5
show(soft_run.path / "predictions.png")

# %% [markdown]
# The reference is above each image, the predicted caption below. After a minute of training, about seven of ten
# captions are exact (`exact_match` above). A run of this length whose backbone also started from random weights learned
# the grammar, the grounds and the colors, but guessed the shapes: three of a hundred captions were exact.
#
# ## Soft attention
#
# A caption with the attention map of each word; bright locations have a high weight, and the number is the largest
# weight. Shown is the first validation image whose caption is exact.

# %%
soft = soft_run.load()
example = next(
    index for index in range(len(val_set)) if soft(val_set.load_image(index)).text == val_set.references(index)[0]
)
image = val_set.load_image(example)
print(f"image {example}: {soft(image)}")
inputs = soft.prepare([image]).inputs
words, weights = word_attention(soft.model, inputs)
draw_word_attention(image, words, weights, out / "soft.png")
show(out / "soft.png")

# %% [markdown]
# Does the attention of a shape's name lie on the shape? `attention_ratio` is the fraction of the attention in a mask,
# relative to the mask's fraction of the image: 1 for attention that is spread evenly. The first name of a caption
# belongs to the left shape, the second one to the right shape. The same for the colors:

# %%
ratios, num_right = {}, 0
for index in range(40):
    scene = val_set.scene(index)
    left, right = sorted(range(2), key=lambda k: scene.shapes[k].x)
    true_colors = [scene.shapes[k].color for k in (left, right)]
    left, right = (torch.as_tensor(scene.masks[k]).bool() for k in (left, right))
    words, weights = word_attention(soft.model, soft.prepare([scene.image]).inputs)
    num_right += sum(map(str.__eq__, [word for word in words if word in COLORS], true_colors))
    for kind, names in (("names", THINGS), ("colors", COLORS)):
        positions = [k for k, word in enumerate(words) if word in names]
        for k, own, other in zip(positions, (left, right), (right, left)):
            for where, mask in (("their own shape", own), ("the other shape", other)):
                ratios.setdefault((kind, where), []).append(float(attention_ratio(weights[k], mask)))
means = {key: sum(values) / len(values) for key, values in ratios.items()}
for (kind, where), mean in means.items():
    print(f"attention of {len(ratios[kind, where])} {kind} on {where}: {mean:.1f} x uniform")
print(f"{num_right} of 80 colors are right")
assert means["names", "their own shape"] > 3 > 2 * means["names", "the other shape"]

# %% [markdown]
# The names attend to their shapes, five times as much as uniform attention would. The colors do not: their attention
# is mostly elsewhere, although 75 of 80 are right. A location of the backbone's map sees beyond its 8 pixels, and the
# state of the LSTM begins with the mean of the whole map, so a color can be known without
# looking at its shape. An attention map tells where a model reads, not where in the image the information was.

# %% [markdown]
# Next, the probabilities that the model predicted for each word, the spaces before words written as ␣.

# %%
attention = caption_attention(soft.model, inputs)
draw_expected(attention.expected, out / "next_words.png", title="The most probable words after each")
show(out / "next_words.png")

# %% [markdown]
# ## Hard attention
#
# The same network now reads a single location for each word. It starts from the weights of the soft-attention model,
# whose names already attend to their shapes. In training, half of the images still use the expectation, as in the
# paper, which limits the variance of the gradient. In evaluation, the model reads the location with the largest weight,
# and the figure shows only that location. After this short training, fewer captions are exact than with soft attention,
# and that of the figure has a wrong color.

# %%
hard_run = train_captioner("hard", epochs=1, lr=5e-4, init=soft_run.weights, reinforce=0.1, entropy=0.002)
hard = hard_run.load()
print(hard(image))
words, weights = word_attention(hard.model, hard.prepare([image]).inputs)
assert ((weights > 0).sum((1, 2)) == 1).all()  # one location for each word
draw_word_attention(image, words, weights, out / "hard.png")
show(out / "hard.png")

# %% [markdown]
# The spread of the soft maps can be measured by the entropy of their weights, expressed as the number of locations with
# equal weights that has the same entropy, $\exp\bigl(-\sum_i \alpha_{ti} \log \alpha_{ti}\bigr)$. For hard attention,
# it is 1 by construction.

# %%
words, weights = word_attention(soft.model, inputs)
spread = (-(weights * weights.clamp(min=1e-12).log()).sum((1, 2))).exp()
print("  ".join(f"{word} {count:.1f}" for word, count in zip(words, spread.tolist())))

# %% [markdown]
# ## Beam search
#
# A captioner decodes like a translator. The tree shows where the model is uncertain.

# %%
torch.manual_seed(0)
draw_beam_tree(soft.model, soft.model.vocabulary, inputs, out / "beams.png", beams=3)
show(out / "beams.png")

# %% [markdown]
# ## Where to go from here
#
# - `vitkit predict runs/captioning --input images` captions a folder of images; `vitkit explain runs/captioning --image
#   image.png` draws one as above.
# - `configs/show_attend_tell.py` has the paper's models on photographs;
#   `configs/caption_transformer_coco.py` replaces the LSTM by a Transformer.
# - Notebook 4 shows what backbones attend to.
