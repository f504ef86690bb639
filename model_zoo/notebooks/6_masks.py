# %% [markdown]
# # From per-pixel classification to Mask2Former
#
# The traditional approach to semantic segmentation is to classify each pixel. MaskFormer (Cheng et al. 2021) showed
# that a model can instead predict a set of masks with one class each, and that the same model then handles semantic,
# instance and panoptic segmentation. Mask2Former (Cheng et al. 2022) outperformed specialized models by restricting
# each query's attention to its previously predicted mask. This notebook compares the two losses on one image, trains
# both kinds of model briefly, and looks inside Mask2Former.

# %%
from pathlib import Path

import torch

import vitkit
from vitkit import CRITERIA
from vitkit.apps.explanations.images import image_attention
from vitkit.apps.explanations.masks import draw_loss_points, draw_merging, draw_queries
from vitkit.apps.explanations.queries import draw_query_heads, draw_query_layers
from vitkit.apps.visualization.canvas import save_grid
from vitkit.apps.visualization.masks import draw_panoptic, draw_semantic
from vitkit.apps.visualization.notebooks import show

out = Path("figures/masks")
torch.manual_seed(0)

# %% [markdown]
# ## Semantic and panoptic ground truth
#
# The image shows two touching objects of the same class. In the semantic map, which assigns a class to each pixel, they
# are one region; the panoptic map separates them, as the two shades of the class's color show.

# %%
WORLD = dict(type="ShapesSegmentation", image_size=64, min_objects=2, max_objects=3, min_size=0.35, max_size=0.6)
dataset = vitkit.build_dataset(dict(WORLD, num_images=8, task="panoptic"))
classes = dataset.classes
image, target = dataset.load_image(4), dataset[4]["target"]
panels = [
    image.repeat(5, axis=0).repeat(5, axis=1),
    draw_semantic(image, dataset.load_semantic(4), classes, opacity=1.0),
    draw_panoptic(image, *dataset.load_panoptic(4), classes),
]
save_grid(panels, ["image", "semantic", "panoptic"], out / "truth.png", per_line=3)
show(out / "truth.png")

# %% [markdown]
# ## Two losses
#
# **Per-pixel classification** minimizes the mean cross entropy over the pixels $x$ of the image $\Omega$,
#
# $$\mathcal{L}_{\text{pixel}} = -\frac{1}{|\Omega|} \sum_{x \in \Omega} \log p_x(c_x).$$
#
# **Mask classification** predicts $N$ pairs of class probabilities $p_j$ and a mask $m_j$. As in DETR, the predictions
# are matched with the ground-truth segments at the least total cost. Let $c_j$ be the class of the segment matched with
# query $j$, or $\varnothing$ ("no object"), and $\hat m_j$ that segment's mask:
#
# $$\mathcal{L}_{\text{mask}} = -\lambda_{\text{cls}} \sum_{j=1}^{N} \log p_j(c_j) + \sum_{j:\, c_j \neq \varnothing}
# \bigl( \lambda_{\text{ce}}\, \mathcal{L}_{\text{ce}}(m_j, \hat m_j)
# + \lambda_{\text{dice}}\, \mathcal{L}_{\text{dice}}(m_j, \hat m_j) \bigr),$$
#
# $$\mathcal{L}_{\text{dice}}(m, \hat m)
# = 1 - \frac{2 \sum_x m(x)\, \hat m(x) + 1}{\sum_x m(x) + \sum_x \hat m(x) + 1}.$$
#
# (In vitkit, "no object" has a weight of a tenth, and each sum is divided by its number of terms.) To see which errors
# each loss penalizes, we construct predictions by hand from masks and labels.

# %%
per_pixel_loss = CRITERIA.build(dict(type="PerPixelCriterion"))
mask_loss = CRITERIA.build(
    dict(
        type="MaskCriterion",
        no_object_weight=0.1,
        num_points=2000,
        weights=dict(labels=2.0, mask=5.0, dice=5.0),
        matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, num_points=2000),
    )
)


def losses(masks, labels, num_queries=6):
    """Both losses of predictions that are sure of these masks and labels; the other queries say "no object"."""
    size = masks.shape[-2:]
    pred_masks = torch.full((num_queries, *size), -6.0)
    pred_masks[: len(masks)] = 12.0 * masks - 6
    pred_logits = torch.zeros(num_queries, len(classes) + 1)
    pred_logits[range(len(masks)), labels] = 8.0
    pred_logits[len(masks) :, -1] = 8.0
    pred_semantic = torch.zeros(len(classes), *size)
    for mask, label in zip(masks, labels):
        pred_semantic[label] += 8.0 * mask
    pixel = per_pixel_loss(dict(pred_semantic=pred_semantic[None], input_size=size), [target])
    outputs = dict(pred_logits=pred_logits[None], pred_masks=pred_masks[None], input_size=size)
    return float(pixel["semantic"]), float(sum(mask_loss(outputs, [target]).values()))


masks, labels = target["masks"].float(), target["labels"]
same = next(label for label in labels.tolist() if (labels == label).sum() > 1)
merged_masks = torch.cat([masks[labels != same], masks[labels == same].amax(0, keepdim=True)])
merged_labels = torch.cat([labels[labels != same], torch.tensor([same])])
cases = {
    "the truth": (masks, labels),
    "the truth, in another order": (masks.flip(0), labels.flip(0)),
    "both things of one class as one": (merged_masks, merged_labels),
    "one thing called another class": (masks, labels.index_fill(0, torch.tensor([0]), (int(labels[0]) + 1) % 6)),
}
print(f"{'':34}{'per pixel':>10}{'masks':>10}")
for name, prediction in cases.items():
    pixel, mask = losses(*prediction)
    print(f"{name:34}{pixel:10.3f}{mask:10.3f}")

# %% [markdown]
# Neither loss depends on the order of the queries (the small difference comes from the random points at which masks are
# compared, see below). Merging the two objects is not an error in the per-pixel loss, but a large one in the mask loss.
# And a wrong class costs one query's cross entropy in the mask loss, however many pixels the object has.
#
# ## Training both
#
# Both models have the same backbone and pixel decoder, and are trained on the same eight images, including the one
# above. In the figures, what is predicted stands beside the truth in the same colors: of several objects of one class
# the leftmost has the class's color, in the panoptic maps, and the others have other shades of it. The per-pixel
# model applies a 1x1 convolution to the pixel decoder's map. Mask2Former uses queries, whose masks are dot products
# of the query embedding and the map, $m_j(x) = \sigma(e_j^\top f(x))$.

# %%
FEW = dict(WORLD, num_images=8)
BACKBONE = dict(type="ResNet", depth=18, norm="bn", out_features=["res2", "res3", "res4"], pretrained=False)
NECK = dict(type="DeformablePixelDecoder", out_channels=96, mask_channels=96, num_levels=2, num_layers=1, d_ffn=384)


def train_short(task, epochs, **sections):
    """Train on eight images, on which it is also evaluated."""
    few = dict(FEW, task=task)
    return vitkit.train(
        "quickstart/mask2former_panoptic",
        data=dict(train=dict(few, transforms=None), val=few, images_per_gpu=8),
        schedule=dict(warmup_steps=10),
        train=dict(epochs=epochs, eval_every=epochs, log_every=50, **sections.pop("train", {})),
        **sections,
    )


pixel_run = train_short(
    "semantic",
    60,
    model=dict(type="PerPixelClassification", backbone=BACKBONE, neck=NECK, head=dict(type="PerPixelBaselineHead")),
    criterion=dict(type="PerPixelCriterion"),
    evaluator=dict(type="SemanticEvaluator"),
    train=dict(best_metric="mIoU"),
)
show(pixel_run.path / "predictions.png")

# %%
mask_run = train_short("panoptic", 120)
show(mask_run.path / "predictions.png")

# %% [markdown]
# ## Predictions of each query
#
# The twelve queries with their classes and masks. Only a few are needed; the others predict "no object", whatever their
# masks are (the class above such a mask is the most probable one other than "no object").

# %%
predictor = mask_run.load()
attention = image_attention(predictor, image)
best = attention.queries.scores.argsort(descending=True).tolist()
draw_queries(attention.view, classes, best, out / "queries.png")
show(out / "queries.png")

# %% [markdown]
# ## Masked attention
#
# A query's cross-attention is restricted to the locations where the mask that it predicted one layer before is at least
# one half:
#
# $$X_l = \operatorname{softmax}(\mathcal{M}_{l-1} + Q_l K_l^\top)\, V_l + X_{l-1}, \qquad
# \mathcal{M}_{l-1}(x) = \begin{cases} 0 & m_{l-1}(x) \geq 0.5 \\ -\infty & \text{otherwise.} \end{cases}$$
#
# (Scores are scaled as in notebook 1.) The first row shows the locations that the query may attend to in each layer,
# the second row its attention, and the third row the predicted mask, which restricts the next layer. The layers use the
# feature maps in turn, starting with the coarsest. Shown is the shape that the model is most sure of. The first region
# comes from the query alone, before it has attended to the image, so it may lie elsewhere, as here.

# %%
shape = next(query for query in best if dataset.things[attention.queries.labels[query]])
draw_query_layers(attention, shape, out / "layers.png")
show(out / "layers.png")

# %% [markdown]
# The attention of the queries of three segments, by head. Layer 1 is shown, the only one that reads the finer map. The
# gate is exact, but its locations are blocks of pixels, a part of which lies outside the segment: the coarser map has
# 4 x 4 locations of 16 pixels, the finer one 8 x 8 of 8 pixels. The fraction of the attention within the outline of the
# final mask, beside the mask's fraction of the image, says how much of it is on the segment itself:

# %%
for layer in attention.decoder_layers:
    rows, columns = layer.maps.shape[-2:]
    print(f"layer {layer.layer}, {rows} x {columns} locations:")
    for query in best[:3]:
        mask, allowed = attention.queries.region(query), layer.gates[query]
        outside = float(layer.maps[query][~allowed].sum())
        fraction = float(mask.float().mean())
        ratio = float(layer.ratios(query, mask).mean())
        name = classes[attention.queries.labels[query]]
        print(
            f"  {name:16} {fraction:.2f} of the image, {ratio * fraction:.2f} of the attention, "
            f"{outside:.2f} of it where the query may not attend"
        )
        assert outside < 1e-6
draw_query_heads(image_attention(predictor, image, decoder_layer=1), best[:3], out / "heads.png")
show(out / "heads.png")

# %% [markdown]
# In layer 1, nine tenths of the attention is on the segment itself; in layer 2, whose blocks are larger, half of that
# of a ring.

# %% [markdown]
# ## A loss at points
#
# Comparing full masks takes memory for each query and pixel. Mask2Former compares masks at sampled points, three
# quarters of them where the prediction is least certain: along borders, and in regions that are easily mistaken for the
# segment.

# %%
draw_loss_points(attention.view, mask_loss, best[:3], out / "points.png")
show(out / "points.png")

# %% [markdown]
# ## Merging masks into a panoptic map
#
# Masks may overlap, but the segments of a panoptic map may not. Each pixel goes to the query with the highest product
# of class score and mask, $\operatorname{arg\,max}_j p_j(c_j)\, m_j(x)$, among the queries with a sufficient class
# score; a segment that keeps too small a part of its mask is dropped. The figure shows which rule decided each pixel.

# %%
draw_merging(attention.view, predictor.model, classes, out / "merging.png")
show(out / "merging.png")

# %% [markdown]
# ## Where to go from here
#
# - `vitkit explain mask2former_r50_coco_panoptic --image street.jpg --html` draws all of this for the published model.
# - `vitkit ablate mask2former_parts` removes masked attention, learned queries, levels and points, one by one.
# - `configs/quickstart/eomt.py` is the later EoMT, in which the queries pass through the last blocks of a plain ViT.
