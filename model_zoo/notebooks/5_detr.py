# %% [markdown]
# # DETR and Deformable DETR
#
# DETR (Carion et al. 2020) predicts a set of objects: a fixed number of queries attend to the image, and each predicts
# one object or "no object", without anchors or non-maximum suppression. The loss makes this possible by matching
# predictions with objects, which this notebook first does by hand. Then it overfits a small DETR and a small Deformable
# DETR (Zhu et al. 2021) on sixteen images, and draws their attention.

# %%
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.optimize import linear_sum_assignment

import vitkit
from vitkit import CRITERIA, MATCHERS
from vitkit.explanations.images import image_attention, image_sampling
from vitkit.explanations.queries import draw_query_heads, draw_query_layers
from vitkit.ops.boxes import cxcywh_to_xyxy, generalized_box_iou
from vitkit.ops.colors import text_color
from vitkit.visualization.boxes import draw_detections
from vitkit.visualization.canvas import save_grid
from vitkit.visualization.curves import plot_runs
from vitkit.visualization.notebooks import show

out = Path("figures/detr")
torch.manual_seed(0)

# %% [markdown]
# ## Matching by hand
#
# A synthetic image with three objects, and six made-up predictions: each query has a box, as centre, width and height
# relative to the image, and a probability for each class.

# %%
WORLD = dict(type="ShapesDetection", image_size=64, min_objects=3, max_objects=3, min_size=0.25, max_size=0.5)
dataset = vitkit.build_dataset(dict(WORLD, num_images=16))
classes = dataset.classes
image, target = dataset.load_image(0), dataset[0]["target"]
labels, target_boxes = target["labels"], target["boxes_cxcywh"]
print([classes[label] for label in labels])

# Queries 1, 3 and 4 are near the objects; 0 is a second, worse guess of the first one, 2 and 5 are elsewhere.
boxes = torch.tensor([[0.75, 0.85, 0.3, 0.2]]).repeat(6, 1)
boxes[5] = torch.tensor([0.8, 0.12, 0.25, 0.2])
boxes[[1, 3, 4]] = target_boxes + 0.02 * torch.randn(3, 4)
boxes[0] = target_boxes[0] + 0.06
logits = torch.randn(6, len(classes) + 1)
logits[[0, 1, 3, 4], labels[[0, 0, 1, 2]]] += torch.tensor([2.0, 4.0, 4.0, 4.0])
probabilities = logits.softmax(-1)

pixels, target_pixels = 64 * cxcywh_to_xyxy(boxes), 64 * cxcywh_to_xyxy(target_boxes)
truth = draw_detections(image, target_pixels, labels, classes)
guesses = draw_detections(image, pixels, range(6), [f"query {i}" for i in range(6)])
save_grid([truth, guesses], ["objects", "predictions"], out / "made_up.png")
show(out / "made_up.png")

# %% [markdown]
# The cost of matching query $j$ with object $i$ is small if the query gives the object's class a high probability and
# its box is close to the object's:
#
# $$\mathcal{C}_{ij} = -\lambda_{\text{cls}}\, \hat p_j(c_i) + \lambda_{L_1} \lVert b_i - \hat b_j \rVert_1
# - \lambda_{\text{giou}} \operatorname{GIoU}(b_i, \hat b_j).$$
#
# Among all assignments of objects to different queries, the Hungarian algorithm finds the one with the least total
# cost:
#
# $$\hat\sigma = \arg\min_{\sigma} \sum_i \mathcal{C}_{i\,\sigma(i)}.$$

# %%
cost = -3 * probabilities[:, labels].T  # (objects, queries)
cost = cost + 5 * torch.cdist(target_boxes, boxes, p=1)
cost = cost - 2 * generalized_box_iou(cxcywh_to_xyxy(target_boxes)[:, None], cxcywh_to_xyxy(boxes))
objects, queries = linear_sum_assignment(cost.numpy())

figure = Figure(figsize=(6, 3), layout="constrained")
axes = figure.subplots()
shown = axes.imshow(cost, cmap="viridis_r")
for i, row in enumerate(cost.tolist()):
    for j, value in enumerate(row):
        axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=text_color(shown.to_rgba(value)))
    axes.add_patch(Rectangle((queries[i] - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor="red", linewidth=3))
axes.set_yticks(range(3), [f"{classes[label]}" for label in labels])
axes.set_xticks(range(6), [f"query {j}" for j in range(6)])
axes.set_title("Cost of each pair, the assignment framed in red")
figure.savefig(out / "cost.png", dpi=110)
show(out / "cost.png")

# %% [markdown]
# Query 0 is also close to the first object, but remains unmatched: it must learn to predict "no object". This makes
# non-maximum suppression unnecessary. vitkit's matcher does the same for all decoder layers and images of a batch at
# once:

# %%
weights = dict(cost_labels=3.0, cost_l1=5.0, cost_giou=2.0)
matcher = MATCHERS.build(dict(type="HungarianMatcher", **weights))
layer = dict(pred_logits=logits[None], pred_boxes=boxes[None])
((((matched_queries, matched_objects),),),) = matcher([([layer], [target])])
pairs = sorted(zip(matched_objects.tolist(), matched_queries.tolist()))
assert pairs == list(zip(objects.tolist(), queries.tolist()))
print("object, query:", pairs)

# %% [markdown]
# Given the matching, the loss is standard: cross entropy for the classes of all queries, where "no object" has a weight
# of a tenth because it is so frequent, and $L_1$ and GIoU losses for the matched boxes. The order of the queries does
# not matter:

# %%
spec = dict(type="SetCriterion", no_object_weight=0.1, weights=dict(labels=3.0, l1=5.0, giou=2.0))
criterion = CRITERIA.build(dict(spec, matcher=dict(type="HungarianMatcher", **weights)))
for name, order in (("as they are", range(6)), ("reversed", range(5, -1, -1))):
    outputs = dict(pred_logits=logits[None, list(order)], pred_boxes=boxes[None, list(order)])
    print(f"{name:12}", {key: round(float(loss), 4) for key, loss in criterion(outputs, [target]).items()})

# %% [markdown]
# ## Training DETR
#
# A ResNet computes feature maps; in the encoder, all locations of the last map attend to each other; in the decoder,
# ten learned queries attend to each other and to the encoded map. We overfit the model on sixteen images, which takes a
# minute, and evaluate it on the same images. (`configs/quickstart/detr.py` trains on 6400 images, and finds nine of ten
# objects in validation images.)

# %%
FEW = dict(
    train=dict(WORLD, num_images=16, split="train", transforms=None),
    val=dict(WORLD, num_images=16, split="train"),
    images_per_gpu=8,
)


def train_short(config, epochs):
    """Train a quickstart config on sixteen images."""
    return vitkit.train(
        config,
        data=FEW,
        train=dict(epochs=epochs, eval_every=epochs // 4, reference_batch_size=8),
        schedule=dict(warmup_steps=20),
    )


detr_run = train_short("quickstart/detr", 120)
show(detr_run.path / "predictions.png")

# %% [markdown]
# ## Encoder self-attention
#
# Encoder self-attention at the centres of the boxes with the highest scores. In a DETR trained on many images, the
# encoder already separates objects: each centre attends to its own object (figure 3 of the paper). Our overfitted model
# does not need this, since any part of an image identifies the image. `vitkit explain detr_r50 --image street.jpg`
# draws the same for the published model.

# %%
detr = detr_run.load()
attention = image_attention(detr, image)
queries = attention.queries
best = queries.scores.argsort(descending=True)[:3].tolist()
centres = [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in queries.boxes_xyxy[best].clamp(0, 63).tolist()]
attention.draw_points(centres, out / "encoder.png")
show(out / "encoder.png")

# %% [markdown]
# ## Decoder cross-attention
#
# The cross-attention of the three queries with the highest scores: averaged over heads, then by head, then by layer for
# one query. Each layer makes predictions and has its own loss. Here, too, the maps are spread out although the boxes
# are right: the model has memorised these boxes.

# %%
attention.draw_queries(best, out / "decoder.png")
show(out / "decoder.png")

# %%
draw_query_heads(attention, best, out / "decoder_heads.png")
show(out / "decoder_heads.png")

# %%
draw_query_layers(attention, best[0], out / "decoder_layers.png")
show(out / "decoder_layers.png")

# %% [markdown]
# ## Deformable DETR
#
# Attention to every location is expensive on large maps. At the start of training it is nearly uniform, and it takes
# long to focus. In Deformable DETR, each head $m$ of a query $z_q$ with reference point $\hat p_q$ samples $K$ points
# on each of $L$ maps, at offsets $\Delta p_{mlqk}$. The offsets are predicted from the query, as are the weights
# $A_{mlqk}$, which sum to 1 over $l$ and $k$:
#
# $$\operatorname{MSDeformAttn}(z_q, \hat p_q) = \sum_{m=1}^{M} W_m \sum_{l=1}^{L} \sum_{k=1}^{K}
# A_{mlqk}\, W'_m x^l\bigl(\phi_l(\hat p_q) + \Delta p_{mlqk}\bigr).$$
#
# $\phi_l$ scales the point to map $l$, and $x^l(\cdot)$ is interpolated bilinearly, so the offsets have gradients. The
# cost grows with the number of points, not with the square of the map size. In the two-stage variant, proposals from
# the encoder are the initial reference boxes, and each decoder layer refines them.

# %%
deformable_run = train_short("quickstart/deformable_detr", 60)
show(deformable_run.path / "predictions.png")

# %% [markdown]
# Each row is a decoder layer, each column a map; the last column shows all maps. The cross is the reference point, the
# dots are the sampling points of all heads, coloured by weight, and the green box is the layer's prediction.

# %%
deformable = deformable_run.load()
sampling = image_sampling(deformable, image)
query = int(sampling.queries.scores.argmax())
sampling.draw_query(query, out / "sampling.png")
show(out / "sampling.png")

# %% [markdown]
# Both models over epochs of the same sixteen images. Memorising them does not require well-placed attention, and both
# models are about equally fast. To detect objects in new images, a model must learn where to attend, for which the
# paper reports that Deformable DETR needs a tenth of DETR's epochs. `vitkit ablate detr_convergence` makes that
# comparison on synthetic images.

# %%
logs = {"DETR": detr_run.path / "log.jsonl", "Deformable DETR": deformable_run.path / "log.jsonl"}
plot_runs(logs, out / "both.png", metrics=["bbox/AP", "bbox/AP50"])
show(out / "both.png")

# %% [markdown]
# ## Where to go from here
#
# - `vitkit explain detr_r50 --image street.jpg --html` draws all of this for the published DETR on your own photograph.
# - `vitkit explain runs/detr --dataset` draws the locations of each query's boxes over a dataset.
# - `configs/quickstart/dino.py` adds DINO's later techniques: denoising, mixed query selection, look forward twice.
