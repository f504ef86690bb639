# %% [markdown]
# # ViT, Swin, MViT, LR-Net: what they look at and what they cost
#
# Four answers to one question: every location of a picture should see the others, but there are many of them. ViT lets
# all attend to all (Dosovitskiy et al. 2021), Swin attends within windows that shift (Liu et al. 2021), MViT pools keys
# and values (Li et al. 2022), and LR-Net weighs the neighbours of each pixel (Hu et al. 2019). This notebook counts
# their cost, trains a small one of each on the synthetic world, and draws what they attend to.

# %%
from pathlib import Path

import torch

import vitkit
from vitkit import BACKBONES
from vitkit.analysis.macs import count_macs
from vitkit.analysis.memory import count_parameters
from vitkit.inference.backbone_pictures import (
    backbone_attention,
    draw_class_token,
    draw_kernels,
    draw_points,
    draw_rollout,
    mean_distances,
)
from vitkit.visualization.costs import plot_costs
from vitkit.visualization.curves import plot_distances
from vitkit.visualization.notebooks import show
from vitkit.visualization.predictions import save_titled

out = Path("pictures/backbones")

# %% [markdown]
# ## What they cost
#
# For a map of $N = h w$ tokens with $C$ channels, a layer of attention takes $4 N C^2$ multiplications for its
# projections to queries, keys, values and output, whatever it attends to. The scores and the weighted sums differ:
#
# | | attends to | multiplications |
# |---|---|---|
# | ViT | all tokens | $2 N^2 C$ |
# | Swin | a window of $M \times M$ | $2 N M^2 C$ |
# | MViT | a map pooled by $s \times s$ | $2 N^2 C / s^2$ |
# | LR-Net | $k \times k$ around each pixel | $N k^2 (C + C / m)$ |
#
# In LR-Net the values are the input itself, and each group of $m$ channels shares its weights, so queries and keys have
# only $C / m$ channels.
#
# A backbone is built by its name, and `count_macs` runs it once and counts. On PyTorch's `meta` device tensors have
# shapes but no values, so even large models on large pictures take no time.

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
# All four were made to cost about the same at 224 x 224. Dense prediction takes larger pictures, and there they part.

# %%
sides = [224, 320, 448, 640, 896]
gmacs, per_pixel = {}, {}
for title, name in NAMES.items():
    with torch.device("meta"):
        backbone = BACKBONES.build(name, pretrained=False)
        totals = [count_macs(backbone, torch.zeros(1, 3, side, side)).total for side in sides]
    gmacs[title] = (sides, [total / 1e9 for total in totals])
    per_pixel[title] = (sides, [total / side**2 / 1e3 for total, side in zip(totals, sides)])
panels = [("side of the picture (pixels)", "G multiply-accumulates", gmacs)]
panels += [("side of the picture (pixels)", "thousand per pixel", per_pixel)]
plot_costs(panels, out / "costs.png")
show(out / "costs.png")

# %% [markdown]
# Per pixel, the cost of windows is constant and that of full attention grows with the picture. MViT's backbone for
# detection attends within windows, too, except for its last layers.
#
# ## Small ones, trained
#
# One shape in each picture, and the class is which. Any backbone goes into any config, here into the quickstart
# classifier; only the part of the config that changes is named. So that it is done in seconds, each learns 64 pictures
# by heart, and is looked at on these. (From pictures it has never seen a ViT learns shapes slowly; `vitkit ablate
# data_needs` compares it with a ResNet and a Swin.)

# %%
WORLD = dict(type="ShapesClassification", image_size=64, num_images=64)
dataset = vitkit.build_dataset(WORLD)
images = [dataset.load_image(index) for index in range(8)]
names = [dataset.classes[dataset.load_labelled(index)[1]] for index in range(8)]
save_titled(images, [(name, "black", "") for name in names], out / "world.png")
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
# ViT's classifier reads one extra token. What that token attends to, layer by layer and head by head:

# %%
image = images[0]
shown = vit.as_evaluated(image)  # as the model gets it, after the validation transforms
layers = backbone_attention(vit, image)
draw_class_token(shown, layers, out / "class_token.png")
show(out / "class_token.png")

# %% [markdown]
# One head tells the shape from the ground, another its border. But a layer's map does not say where information came
# from, because the tokens had mixed in the layers before. **Attention rollout** (Abnar & Zuidema 2020) multiplies the
# layers, half of each being the identity for the residual path, where $\bar A_l$ is the mean of the heads of layer $l$:
#
# $$R_l = \tfrac{1}{2} \bigl(\bar A_l + I\bigr)\, R_{l-1}, \qquad R_0 = I.$$

# %%
draw_rollout(shown, layers, [], out / "rollout.png", class_token=True)
show(out / "rollout.png")

# %% [markdown]
# ## Swin: windows and shifts
#
# In every second layer the windows are shifted by half of their side, so that what was parted by a border is together
# one layer later. The green frame is all that the token at the point may attend to. Watch it move between two layers of
# one stage, and grow when patches are merged.

# %%
swin = train_classifier(
    dict(type="Swin", embed_dim=32, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8], window=4, drop_path=0.0), epochs=40
)
draw_points(swin.as_evaluated(image), backbone_attention(swin, image), [(28, 28)], out / "swin.png")
show(out / "swin.png")

# %% [markdown]
# ## MViT: pooled keys
#
# Each layer sees the whole map, but keys and values are pooled first: by 4 in the first stage, where the map is
# largest, and by less in the next ones, so that all layers attend to maps of a similar small size, which is above each
# panel.

# %%
mvit = train_classifier(
    dict(type="MViT", depths=[1, 1, 2, 1], embed_dim=32, num_heads=1, image_size=64, drop_path=0.0), epochs=40
)
draw_points(mvit.as_evaluated(image), backbone_attention(mvit, image), [(28, 28)], out / "mvit.png")
show(out / "mvit.png")

# %% [markdown]
# ## How far they look
#
# The **mean attention distance** of a head is the distance from a token to the others, weighted by its attention,
# $\sum_j \alpha_{ij} \lVert x_i - x_j \rVert$, averaged over tokens and pictures, here in pixels. A dot is a head.
# Windows bound Swin's in its first stages. In large pretrained ViTs some heads of the first layers look near and those
# of the last ones far; all heads of this one, which is small and has seen little, look equally far.

# %%
models = {}
for name, predictor in (("ViT", vit), ("Swin", swin), ("MViT", mvit)):
    models[name] = {layer: heads.numpy() for layer, heads in mean_distances(predictor, images).items()}
plot_distances(models, out / "distances.png", num_images=len(images))
show(out / "distances.png")

# %% [markdown]
# ## LR-Net: kernels that depend on the picture
#
# A convolution has the same kernel everywhere. LR-Net replaces it by weights that are computed for each pixel $p$ over
# its neighbours $p + \delta$: a similarity $\Phi$ of query and key, plus a learned prior of the offset alone,
#
# $$\omega(p, \delta) = \operatorname{softmax}_{\delta} \bigl( \Phi(q_p, k_{p+\delta}) + G(\delta) \bigr).$$
#
# For each of several layers the upper row is the softmax of the prior $G$ alone, the lower one the kernel at the point;
# each panel is one group of channels. Trained so briefly, it leans on the prior. The last map is smaller than the
# window: what lies outside gets no weight.

# %%
lrnet = train_classifier(dict(type="LRNet", depth=26), epochs=5)
layers = backbone_attention(lrnet, image)
draw_kernels(lrnet.as_evaluated(image), lrnet.model, layers[1:9:3], (28, 28), out / "kernels.png")
show(out / "kernels.png")

# %% [markdown]
# ## Where to go from here
#
# - `vitkit explain runs/classifier --image picture.png --html` makes all of these for any backbone, also under a
#   detector, and a page to point at.
# - `vitkit analyze --table` lists all backbones with parameters and multiply-accumulates beside the published ones.
# - `configs/ablations/vit_parts.py`, `swin_parts.py`, `lrnet_parts.py` and `data_needs.py` take the parts away one by
#   one.
