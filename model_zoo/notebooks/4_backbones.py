# %% [markdown]
# # ViT, Swin, MViT, LR-Net: attention and cost
#
# Attention between all locations of an image is expensive, because there are many of them. The four backbones deal with
# this differently: ViT lets all tokens attend to all (Dosovitskiy et al. 2021), Swin attends within shifted windows
# (Liu et al. 2021), MViT pools keys and values (Li et al. 2022), and LR-Net weighs the neighbors of each pixel (Hu et
# al. 2019). This notebook counts their cost, and draws the attention of a small model of each on synthetic images.

# %%
from pathlib import Path

import numpy as np
import torch

import vitkit
from vitkit import BACKBONES
from vitkit.apps.analysis.macs import count_macs
from vitkit.apps.analysis.memory import count_parameters
from vitkit.apps.analysis.reports.cost_plots import plot_costs
from vitkit.apps.explanations.backbones import (
    attention_distance,
    backbone_attention,
    draw_class_token,
    draw_kernels,
    draw_points,
    draw_rollout,
    mean_distances,
    rollout_maps,
)
from vitkit.apps.explanations.distances import plot_distances
from vitkit.apps.explanations.panels import Panel, draw_rows
from vitkit.apps.explanations.regions import attention_ratio
from vitkit.apps.visualization.canvas import save_grid
from vitkit.apps.visualization.notebooks import show

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
# ## ViT: the class token
#
# ViT's classifier reads one extra token, the class token. `vitkit.load("shapes_vit")` comes with the package: a small
# ViT that tells six shapes apart, on patches of the map of a small ResNet (`configs/quickstart/vit.py`; the hybrid of
# the paper's section 3.1, since without a ResNet a ViT needs many more images, see `vitkit ablate data_needs`). The
# images are validation images, which it has not seen.

# %%
vit = vitkit.load("shapes_vit")
val_set = vitkit.build_dataset(dict(type="ShapesClassification", image_size=64, num_images=48, split="val"))
scenes = [val_set.scene(index) for index in range(len(val_set))]
masks = [torch.as_tensor(scene.masks[0]).bool() for scene in scenes]  # of the shapes
names = [val_set.classes[scene.labels[0]] for scene in scenes]
save_grid([scene.image for scene in scenes[:8]], names[:8], out / "world.png")
show(out / "world.png")
right = sum(vit(scene.image).names[0] == name for scene, name in zip(scenes, names))
print(f"{right} of {len(scenes)} images are classified correctly")
assert right > 0.9 * len(scenes)

# %% [markdown]
# What the class token attends to, by layer and head. The number is `attention_ratio`: the fraction of the attention
# inside the shape's outline, relative to the outline's fraction of the image. Attention that ignores the shape has a
# ratio of 1.

# %%
layers = backbone_attention(vit, scenes[0].image)
shown = vit.as_evaluated(scenes[0].image)  # as the model gets it, after the validation transforms
draw_class_token(shown, layers, out / "class_token.png", region=masks[0])
show(out / "class_token.png")

# %% [markdown]
# The map of a single layer does not show where information came from, because earlier layers have already mixed the
# tokens. **Attention rollout** (Abnar & Zuidema 2020) multiplies the attention matrices of all layers, averaged with
# the identity for the residual connection, where $\bar A_l$ is the mean over the heads of layer $l$:
#
# $$R_l = \tfrac{1}{2} \bigl(\bar A_l + I\bigr)\, R_{l-1}, \qquad R_0 = I.$$

# %%
draw_rollout(shown, layers, [], out / "rollout.png", class_token=True, region=masks[0])
show(out / "rollout.png")

# %% [markdown]
# For this star, a head of the first block attends to its middle, and later heads to one of its points or to several of
# its corners, by which a star is told from other shapes. One image may be a lucky one, so here are the same numbers as
# means over 48 images:

# %%
ratios, rollouts = [], []
for scene, mask in zip(scenes, masks):
    layers = backbone_attention(vit, scene.image)
    ratios.append(torch.stack([attention_ratio(layer.class_token(), mask) for layer in layers]))
    rollouts.append(torch.stack([attention_ratio(steps[0], mask) for steps in rollout_maps(layers, [0])]))
ratios, rollouts = torch.stack(ratios).mean(0), torch.stack(rollouts).mean(0)
for number, heads in enumerate(ratios, start=1):
    listed = " ".join(f"{head:5.2f}" for head in heads)
    print(f"block {number}: {listed} x uniform by head, rollout {rollouts[number - 1]:.2f} x uniform")
assert ratios.min() > 1.2 and rollouts.min() > 1.2

# %% [markdown]
# On average, every head attends to the shape more than to the ground. In the rollout, the shape stands out in each
# step, but less and less: with each layer, more of what reaches the class token has passed through other tokens.
#
# ## Training small models
#
# The other three backbones are trained here, on 64 images, which the figures show. Any backbone can be used in any
# config, here in the quickstart classifier; we pass only the parts of the config that change.

# %%
WORLD = dict(type="ShapesClassification", image_size=64, num_images=64)
image = vitkit.build_dataset(WORLD).load_image(0)


def train_classifier(backbone, *, epochs, batch_size=32, world=WORLD):
    """Train the quickstart classifier on a backbone, and evaluate it on the images that it was trained on."""
    run = vitkit.train(
        "quickstart/classifier",
        model=dict(backbone=dict(backbone, pretrained=False)),
        data=dict(train=dict(world, transforms=None), val=world, images_per_gpu=batch_size),
        train=dict(epochs=epochs, eval_every=epochs, reference_batch_size=batch_size),
    )
    print(backbone["type"], "top-1", run.metrics["top1"])
    assert run.metrics["top1"] > 0.9
    return run.load()


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
ratios, middles = [], []
world = vitkit.build_dataset(WORLD)
for scene in map(world.scene, range(len(world))):
    mask = torch.as_tensor(scene.masks[0]).bool()
    y, x = mask.nonzero().float().mean(0).tolist()
    middles.append((x, y))
    blocks = backbone_attention(mvit, scene.image)
    ratios.append(torch.stack([attention_ratio(block.at((x, y)).mean(0, keepdim=True), mask)[0] for block in blocks]))
ratios = torch.stack(ratios)
print("the middle of the shape attends to it, x uniform by block:", *[f"{mean:.2f}" for mean in ratios.mean(0)])
clearest = int(ratios.amin(1).argmax())
image = world.load_image(clearest)
draw_points(mvit.as_evaluated(image), backbone_attention(mvit, image), [middles[clearest]], out / "mvit.png")
show(out / "mvit.png")
assert 0.6 < ratios.mean() < 1.5 and ratios[clearest].mean() > ratios.mean()

# %% [markdown]
# Shown is the image in which the block that attends least to the shape does so most. That is not typical: over all
# images, each block's ratio is near 1, so after this short training on 64 images a point attends to the ground and the
# border of the image as much as to its shape. What tells the classes apart is in the features, less in where this model
# looks.
#
# ## What one output sees
#
# Attention maps belong to single layers. What all layers together let one output see is its gradient with respect to
# the pixels: the **effective receptive field** (Luo et al. 2016), here of the output in the middle of each map, as the
# mean of the absolute gradient over images of noise and random directions of the channels. The weights are random, so
# this is what the architecture prefers before it has learned anything; training changes it. Colors span four orders of
# magnitude, and the number is the fraction of the gradient in the cell of the map that the output stands for.

# %%
SIDE, MAPS = 96, ["res2", "res3", "res4"]
FIELDS = {"ResNet-18": ("resnet18", MAPS), "Swin-T": ("swin_tiny", MAPS), "MViTv2-T": ("mvitv2_tiny", MAPS)}
FIELDS["ViT-S/16"] = ("vit_small_patch16", ["res4"])  # its only map
torch.manual_seed(0)
noise = torch.rand(4, 3, SIDE, SIDE)


def receptive_field(backbone, name):
    """Return the mean absolute gradient of the middle of a map with respect to the pixels, (SIDE, SIDE)."""
    pixels = noise.clone().requires_grad_()
    features = backbone(pixels)[name]
    height, width = features.shape[-2:]
    middle = features[:, :, height // 2, width // 2]
    (gradient,) = torch.autograd.grad((middle * torch.randn_like(middle)).sum(), pixels)
    return gradient.abs().mean((0, 1))


def own_share(field, stride):
    """Return the fraction of a field within the output's own cell of the map."""
    start = SIDE // stride // 2 * stride
    return float(field[start : start + stride, start : start + stride].sum() / field.sum())


rows, shares = [], {}
for title, (name, maps) in FIELDS.items():
    backbone = BACKBONES.build(name, pretrained=False, out_features=maps).eval()
    panels = []
    for each in maps:
        field, stride = receptive_field(backbone, each), backbone.feature_info[each].stride
        shares[title, each] = own_share(field, stride)
        shown = (field / field.max()).clamp(min=1e-4).log10() + 4  # four orders of magnitude
        panels.append(Panel(f"{each}, stride {stride}: {shares[title, each]:.2f}", image=shown.numpy()))
    rows.append((title, [None] * (len(MAPS) - len(maps)) + panels))
white = np.full((SIDE, SIDE, 3), 255, np.uint8)
draw_rows(
    white,
    rows,
    out / "fields.png",
    title="What the output in the middle sees, log scale; fraction in its own cell",
    panel=2.0,
)
show(out / "fields.png")
assert shares["ResNet-18", "res4"] < 0.2 and shares["ViT-S/16", "res4"] > 2 * shares["ResNet-18", "res4"]

# %% [markdown]
# A ResNet's field is a bell that grows with depth, and fades towards its border. Swin's consists of windows, which grow
# with each patch merging. A ViT can see the whole image from its first layer on, but before training the residual
# connection dominates: most of what an output sees is its own patch, and the rest, by attention, is evenly faint. Where
# to look has to be learned, whereas a convolution looks at its surroundings from the start.
#
# ## Attention distance
#
# The **mean attention distance** of a head is the distance from a token to the others, weighted by its attention,
# $\sum_j \alpha_{ij} \lVert x_i - x_j \rVert$, averaged over tokens and images, here in pixels. Each dot is a head.

# %%
few = [scene.image for scene in scenes[:8]]
models = {}
for name, predictor in (("ViT", vit), ("Swin", swin), ("MViT", mvit)):
    models[name] = {layer: heads.numpy() for layer, heads in mean_distances(predictor, few).items()}
plot_distances(models, out / "distances.png", num_images=len(few))
show(out / "distances.png")
everywhere = layers[0].weights[:, :1, 1:, 1:].new_ones(1, 1, 64, 64) / 64
uniform = float(attention_distance(everywhere, layers[0].queries, layers[0].keys))
print(f"uniform attention over 64 x 64 pixels has a distance of {uniform:.1f} pixels")
nearest = min(float(heads.min()) for heads in models["ViT"].values())
print(f"ViT's heads: {nearest:.1f} pixels at least; Swin's first block: {models['Swin']['stage 1 block 1'].max():.1f}")
assert nearest > 0.8 * uniform and models["Swin"]["stage 1 block 1"].max() < 0.3 * uniform

# %% [markdown]
# Swin attends within windows of 4 x 4 tokens: a few pixels in the first stage, and twice as far after each patch
# merging, until a window covers the image. All heads of this ViT have about the distance of uniform attention: they
# choose tokens by content, wherever they are. In large ViTs trained on large data sets, some heads of the first layers
# attend locally (figure 7 of the paper). Two reasons why none does here are known: on few images, such heads are not
# learned (Raghu et al. 2021), and in hybrids they are rarer, since the ResNet has already mixed neighbors (section 4.5
# of the ViT paper). `vitkit explain vit_base_patch16 --images photos` draws the same plot for the published weights.
#
# ## LR-Net: kernels that depend on the image
#
# A convolution has the same kernel at all locations. LR-Net replaces it by weights that are computed for each pixel $p$
# over its neighbors $p + \delta$: a similarity $\Phi$ of query and key, plus a learned prior that depends only on the
# offset,
#
# $$\omega(p, \delta) = \operatorname{softmax}_{\delta} \bigl( \Phi(q_p, k_{p+\delta}) + G(\delta) \bigr).$$
#
# For each of several layers, the upper row is the softmax of only the prior $G$, and the lower row the kernel at the
# marked point; each panel is one group of channels. In the first of them, some groups weigh the pixels that are like
# the point more or less than the prior does; in the others, the kernels mostly follow the prior after such a short
# training. Windows that reach beyond the map have no weight there (gray). The model has 13 million parameters, so it is
# trained on fewer and smaller images, until it knows them.

# %%
SMALL = dict(WORLD, image_size=48, num_images=32)
lrnet = train_classifier(dict(type="LRNet", depth=26), epochs=40, batch_size=16, world=SMALL)
image = vitkit.build_dataset(SMALL).load_image(0)
layers = backbone_attention(lrnet, image)
draw_kernels(lrnet.as_evaluated(image), lrnet.model, layers[1:9:3], (21, 21), out / "kernels.png")
show(out / "kernels.png")

# %% [markdown]
# ## Where to go from here
#
# - `vitkit explain runs/classifier --image photo.png --html` draws all of these figures for any backbone, also in a
#   detector, and an interactive page.
# - `vitkit analyze --table` lists all backbones with parameters and multiply-accumulates beside the published ones.
# - `configs/ablations/vit_parts.py` removes components one by one; `data_needs.py` varies the amount of training data.
