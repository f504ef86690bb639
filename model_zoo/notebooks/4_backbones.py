# %% [markdown]
# # ViT, Swin, MViT, LR-Net: attention and cost
#
# Attention between all locations of an image is expensive, because there are many of them. The four backbones deal with
# this differently: ViT lets all tokens attend to all (Dosovitskiy et al. 2021), Swin attends within shifted windows
# (Liu et al. 2021), MViT pools keys and values (Li et al. 2022), and LR-Net weighs the neighbours of each pixel (Hu et
# al. 2019). This notebook counts their cost, trains a small model of each on synthetic images, and draws their
# attention.

# %%
from pathlib import Path

import torch

import vitkit
from vitkit import BACKBONES
from vitkit.analysis.macs import count_macs
from vitkit.analysis.memory import count_parameters
from vitkit.explanations.backbones import (
    backbone_attention,
    draw_class_token,
    draw_kernels,
    draw_points,
    draw_rollout,
    mean_distances,
)
from vitkit.visualization.canvas import save_grid
from vitkit.visualization.costs import plot_costs
from vitkit.visualization.curves import plot_distances
from vitkit.visualization.notebooks import show

out = Path("figures/backbones")

# %% [markdown]
# ## Computational cost
#
# For a map of $N = h w$ tokens with $C$ channels, an attention layer of ViT, Swin or MViT takes about $4 N C^2$
# multiplications for its projections to queries, keys, values and output, whatever it attends to. The cost of the
# scores and weighted sums differs:
#
# | | attends to | multiplications |
# |---|---|---|
# | ViT | all tokens | $2 N^2 C$ |
# | Swin | a window of $M \times M$ | $2 N M^2 C$ |
# | MViT | a map pooled by $s \times s$ | $2 N^2 C / s^2$ |
# | LR-Net | $k \times k$ around each pixel | $N k^2 (C + C / m)$ |
#
# In LR-Net, the values are the input itself, and each group of $m$ channels shares its weights, so queries and keys
# have only $C / m$ channels, and the projections take $N C^2 (1 + 2 / m)$.
#
# A backbone is built by name, and `count_macs` runs it once and counts its multiply-accumulates. On PyTorch's `meta`
# device, tensors have shapes but no values, so even large models on large images take almost no time.

# %%
NAMES = {"ViT-S/16": "vit_small_patch16", "Swin-T": "swin_tiny", "MViTv2-T": "mvitv2_tiny", "LR-Net-50": "lrnet50"}

for title, name in NAMES.items():
    with torch.device("meta"):
        classifier = BACKBONES.build(name, num_classes=1000, pretrained=False)
        macs = count_macs(classifier, torch.zeros(1, 3, 224, 224))
    parameters = count_parameters(classifier)[""].total
    print(
        f"{title:10} {parameters / 1e6:5.1f} M parameters  {macs.total / 1e9:5.2f} G multiply-accumulates at 224 x 224"
    )

# %% [markdown]
# All four were designed for about the same cost at 224 x 224. On the larger images of dense prediction, their costs
# diverge.

# %%
sides = [224, 320, 448, 640, 896]
gmacs, per_pixel = {}, {}
for title, name in NAMES.items():
    with torch.device("meta"):
        backbone = BACKBONES.build(name, pretrained=False)
        totals = [count_macs(backbone, torch.zeros(1, 3, side, side)).total for side in sides]
    gmacs[title] = (sides, [total / 1e9 for total in totals])
    per_pixel[title] = (sides, [total / side**2 / 1e3 for total, side in zip(totals, sides)])
panels = [("side of the image (pixels)", "G multiply-accumulates", gmacs)]
panels += [("side of the image (pixels)", "thousand per pixel", per_pixel)]
plot_costs(panels, out / "costs.png")
show(out / "costs.png")

# %% [markdown]
# Per pixel, the cost of windowed attention is constant, and that of full attention grows with the image. MViT's
# detection backbone also attends within windows, except in the last blocks of res3, res4 and res5.
#
# ## Training small models
#
# Each image shows one shape, which is its class. Any backbone can be used in any config, here in the quickstart
# classifier; we pass only the parts of the config that change. To keep training short, each model overfits 64 images,
# and the figures show these images. (A ViT learns slowly to classify shapes in images that it was not trained on;
# `vitkit ablate data_needs` compares it with a ResNet and a Swin.)

# %%
WORLD = dict(type="ShapesClassification", image_size=64, num_images=64)
dataset = vitkit.build_dataset(WORLD)
images = [dataset.load_image(index) for index in range(8)]
names = [dataset.classes[dataset.load_labelled(index)[1]] for index in range(8)]
save_grid(images, names, out / "world.png")
show(out / "world.png")


# %%
def train_classifier(backbone, *, epochs):
    """Train the quickstart classifier on a backbone."""
    run = vitkit.train(
        "quickstart/classifier",
        model=dict(backbone=dict(backbone, pretrained=False)),
        data=dict(train=dict(WORLD, transforms=None), val=WORLD, images_per_gpu=32),
        train=dict(epochs=epochs, eval_every=epochs, reference_batch_size=32),
    )
    print(backbone["type"], "top-1", run.metrics["top1"])
    return run.load()


vit = train_classifier(dict(type="ViT", patch_size=8, d_model=64, depth=4, num_heads=4, image_size=64), epochs=60)

# %% [markdown]
# ## ViT: the class token
#
# ViT's classifier reads one extra token, the class token. Its attention by layer and head:

# %%
image = images[0]
shown = vit.as_evaluated(image)  # as the model gets it, after the validation transforms
layers = backbone_attention(vit, image)
draw_class_token(shown, layers, out / "class_token.png")
show(out / "class_token.png")

# %% [markdown]
# One head separates the shape from the background, another attends to its border. But the map of a single layer does
# not show where information came from, because earlier layers have already mixed the tokens. **Attention rollout**
# (Abnar & Zuidema 2020) multiplies the attention matrices of all layers, averaged with the identity for the residual
# connection, where $\bar A_l$ is the mean over the heads of layer $l$:
#
# $$R_l = \tfrac{1}{2} \bigl(\bar A_l + I\bigr)\, R_{l-1}, \qquad R_0 = I.$$

# %%
draw_rollout(shown, layers, [], out / "rollout.png", class_token=True)
show(out / "rollout.png")

# %% [markdown]
# ## Swin: windows and shifts
#
# In every second layer, the windows are shifted by half their side, so that tokens separated by a window border are in
# the same window one layer later. The green frame is the window of the token at the marked point. It moves between two
# layers of a stage, and grows with each patch merging.

# %%
swin = train_classifier(
    dict(type="Swin", embed_dim=32, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8], window=4, drop_path=0.0), epochs=40
)
draw_points(swin.as_evaluated(image), backbone_attention(swin, image), [(28, 28)], out / "swin.png")
show(out / "swin.png")

# %% [markdown]
# ## MViT: pooled keys
#
# Each layer attends to the full map, but keys and values are pooled first: by 4 in the first stage, where the map is
# largest, and by less in later stages, so that all layers attend to maps of a similar small size, given above each
# panel.

# %%
mvit = train_classifier(
    dict(type="MViT", depths=[1, 1, 2, 1], embed_dim=32, num_heads=1, image_size=64, drop_path=0.0), epochs=40
)
draw_points(mvit.as_evaluated(image), backbone_attention(mvit, image), [(28, 28)], out / "mvit.png")
show(out / "mvit.png")

# %% [markdown]
# ## Attention distance
#
# The **mean attention distance** of a head is the distance from a token to the others, weighted by its attention,
# $\sum_j \alpha_{ij} \lVert x_i - x_j \rVert$, averaged over tokens and images, here in pixels. Each dot is a head. In
# Swin's first stages, the windows limit the distance. In large pretrained ViTs, some heads of the first layers attend
# locally and those of the last layers globally; in this small ViT, trained on few images, all heads have about the same
# distance.

# %%
models = {}
for name, predictor in (("ViT", vit), ("Swin", swin), ("MViT", mvit)):
    models[name] = {layer: heads.numpy() for layer, heads in mean_distances(predictor, images).items()}
plot_distances(models, out / "distances.png", num_images=len(images))
show(out / "distances.png")

# %% [markdown]
# ## LR-Net: kernels that depend on the image
#
# A convolution has the same kernel at all locations. LR-Net replaces it by weights that are computed for each pixel $p$
# over its neighbours $p + \delta$: a similarity $\Phi$ of query and key, plus a learned prior that depends only on the
# offset,
#
# $$\omega(p, \delta) = \operatorname{softmax}_{\delta} \bigl( \Phi(q_p, k_{p+\delta}) + G(\delta) \bigr).$$
#
# For each of several layers, the upper row is the softmax of the prior $G$ alone, and the lower row the kernel at the
# marked point; each panel is one group of channels. After such a short training, the kernels mostly follow the prior.
# The last map is smaller than the window; locations outside the map get no weight.

# %%
lrnet = train_classifier(dict(type="LRNet", depth=26), epochs=5)
layers = backbone_attention(lrnet, image)
draw_kernels(lrnet.as_evaluated(image), lrnet.model, layers[1:9:3], (28, 28), out / "kernels.png")
show(out / "kernels.png")

# %% [markdown]
# ## Where to go from here
#
# - `vitkit explain runs/classifier --image photo.png --html` draws all of these figures for any backbone, also in a
#   detector, and an interactive page.
# - `vitkit analyze --table` lists all backbones with parameters and multiply-accumulates beside the published ones.
# - `configs/ablations/vit_parts.py` removes components one by one; `data_needs.py` varies the amount of training data.
