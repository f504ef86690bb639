# %% [markdown]
# # DETR and Deformable DETR
#
# DETR (Carion et al. 2020) predicts a set of objects: a fixed number of queries attend to the image, and each predicts
# one object or "no object", without anchors or non-maximum suppression. The loss makes this possible by matching
# predictions with objects, which this notebook first does by hand. Then it draws and measures the attention of two
# small models that come with vitkit, a DETR and a DINO, whose attention is that of Deformable DETR (Zhu et al. 2021).

# %%
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.optimize import linear_sum_assignment

import vitkit
from vitkit import CRITERIA, MATCHERS
from vitkit.apps.explanations.images import image_attention, image_sampling
from vitkit.apps.explanations.queries import draw_query_heads, draw_query_layers
from vitkit.apps.visualization.boxes import draw_detections
from vitkit.apps.visualization.canvas import save_grid
from vitkit.apps.visualization.colors import text_color
from vitkit.apps.visualization.notebooks import show
from vitkit.ops.boxes import box_iou, cxcywh_to_xyxy, generalized_box_iou

out = Path("figures/detr")
torch.manual_seed(0)

# %% [markdown]
# ## Matching by hand
#
# A synthetic image with three objects, and six made-up predictions: each query has a box, as center, width and height
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
# $$\hat\sigma = \operatorname{arg\,min}_{\sigma} \sum_i \mathcal{C}_{i\,\sigma(i)}.$$

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
# Query 0 is also close to the first object, but remains unmatched: it must learn to predict "no object". A model that
# has learned this needs no non-maximum suppression. vitkit's matcher does the same for all decoder layers and images of
# a batch at once:

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
# ## A trained DETR
#
# A ResNet computes feature maps; in the encoder, all locations of the last map attend to each other; in the decoder,
# ten learned queries attend to each other and to the encoded map. `vitkit.load("shapes_detr")` is part of the package:
# `configs/quickstart/detr.py`, trained to its end. All images below are validation images, which it has not seen.

# %%
SCORE = 0.7  # of the queries that count as detections
detr = vitkit.load("shapes_detr")
WORLD = dict(type="ShapesDetection", image_size=64, max_objects=3, min_size=0.2, max_size=0.5, split="val")
val_set = vitkit.build_dataset(dict(WORLD, min_objects=2, num_images=24))
images = [val_set.load_image(index) for index in range(len(val_set))]
drawn = [detr(image, threshold=SCORE).draw() for image in images[:8]]
save_grid(drawn, [f"image {index}" for index in range(8)], out / "detections.png")
show(out / "detections.png")

# %% [markdown]
# These are the first eight images, with the model's mistakes. Nothing removes duplicates after the model. How many are
# there? We assign each detection to the object with which its box has the largest IoU, if that is above one half, and
# count the objects that are found, and the detections of an object that another one has found already.


# %%
def boxes_of(index):
    """The boxes of a validation image's objects and their centers, in pixels."""
    boxes_xyxy = 64 * cxcywh_to_xyxy(val_set[index]["target"]["boxes_cxcywh"])
    return boxes_xyxy.tolist(), ((boxes_xyxy[:, :2] + boxes_xyxy[:, 2:]) / 2).tolist()


def count_duplicates(model, threshold):
    """The numbers of objects, of those that are found, of detections, of duplicates, and of those of one class."""
    counts = torch.zeros(5, dtype=torch.int64)
    for index, image in enumerate(images):
        detected, objects_xyxy = model(image, threshold=threshold), torch.tensor(boxes_of(index)[0])
        overlap, which = box_iou(detected.boxes[:, None], objects_xyxy).max(1)
        objects, of_class = which[overlap > 0.5].tolist(), detected.labels[overlap > 0.5].tolist()
        again = len(objects) - len(set(objects))
        again_same = len(objects) - len(set(zip(objects, of_class)))
        counts += torch.tensor([len(objects_xyxy), len(set(objects)), len(detected.labels), again, again_same])
    return counts.tolist()


for threshold in (0.5, SCORE, 0.9):
    objects, found, detected, again, same = count_duplicates(detr, threshold)
    print(
        f"score {threshold}: {found} of {objects} objects found by {detected} detections, "
        f"{again} of them duplicates, {same} with the class of the other detection"
    )
assert again == 0

# %% [markdown]
# Duplicates are rare, not impossible. In image 5, two queries are on the small cross: one calls it a star, the other
# one a cross, and neither is sure. Non-maximum suppression by class would keep both. As the loss lets only one query of
# an object keep its score, there is no duplicate above a score of 0.9.

# %% [markdown]
# ## A measure of what an attention map shows
#
# A map looks convincing wherever it happens to be bright, so we measure it. `attention_ratio` is the fraction of the
# attention that lies in an object's box, relative to the box's share of the image:
#
# $$r = \frac{\sum_{x \in \text{box}} \alpha(x)}{\sum_x \alpha(x)} \bigg/
# \frac{\lvert \text{box} \rvert}{\lvert \text{image} \rvert}.$$
#
# Uniform attention has $r = 1$. The figures below give this number for each map, and the tables its mean over all
# objects of 24 images, by layer and head.


# %%
def confident(queries):
    """The queries that detected something, best first."""
    return [query for query in queries.scores.argsort(descending=True).tolist() if queries.scores[query] > SCORE]


def print_ratios(title, ratios):
    """Print the mean of the ratios (layers, objects, heads) over the objects, for each layer and head."""
    print(f"{title}, {ratios.shape[1]} objects")
    for number, heads in enumerate(ratios.mean(1)):
        print(f"  layer {number}: {heads.mean():.2f} x uniform   heads {' '.join(f'{head:5.2f}' for head in heads)}")


# %% [markdown]
# ## Encoder self-attention
#
# What the centers of the objects' boxes attend to in the encoder (figure 3 of the paper): in the last layer, each
# center attends to its own object more than to the rest, before any query has asked for it. The image is one of the
# eight above whose two objects differ in color and lie apart, so that their maps can be told from each other.

# %%
EXAMPLE = 6
image = images[EXAMPLE]
attention = image_attention(detr, image)
boxes_xyxy, centers = boxes_of(EXAMPLE)
attention.draw_points(centers, out / "encoder.png", boxes_xyxy=boxes_xyxy)
show(out / "encoder.png")
assert attention.point_ratios(centers, boxes_xyxy).mean(-1).min() > 1  # each center, on its own object

# %%
encoder_ratios = []
for layer in range(2):
    ratios = []
    for index, other in enumerate(images):
        boxes_xyxy, centers = boxes_of(index)
        ratios.append(image_attention(detr, other, encoder_layer=layer).point_ratios(centers, boxes_xyxy))
    encoder_ratios.append(torch.cat(ratios))
print_ratios("encoder, attention of a box's center in the box", torch.stack(encoder_ratios))
assert encoder_ratios[-1].mean() > 1.5

# %% [markdown]
# The first layer hardly prefers the object, the last one does in all heads. In images with two objects of one color
# (image 1 above), a part of the attention goes to the other one, since the encoder compares what it sees at two
# locations.

# %% [markdown]
# ## Decoder cross-attention
#
# The cross-attention of the queries that detected something: averaged over heads, then by head, then by layer for one
# query. Each layer makes predictions and has its own loss. Most heads attend to the object; some also look at the
# ground around it, and their numbers are near or below 1.
#
# In figure 6 of the paper, the decoder attends to the extremities of objects, such as heads and legs, which bound their
# boxes. That is not to be seen here: the map has 8 x 8 locations of 8 pixels, a shape covers two to four of them on a
# side, and the attention lies mostly in the object's middle or spreads beyond it. `vitkit explain detr_r50` draws the
# published model's.

# %%
best = confident(attention.queries)
attention.draw_queries(best, out / "decoder.png")
show(out / "decoder.png")

# %%
draw_query_heads(attention, best, out / "decoder_heads.png")
show(out / "decoder_heads.png")

# %%
draw_query_layers(attention, best[0], out / "decoder_layers.png")
show(out / "decoder_layers.png")

# %%
views = [image_attention(detr, other) for other in images]
ratios = torch.cat([view.query_ratios(confident(view.queries)) for view in views if confident(view.queries)], dim=1)
print_ratios("decoder, attention of a query in its box", ratios)
assert ratios.mean((1, 2)).min() > 1.5

# %% [markdown]
# ## Deformable attention
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
#
# DINO (Zhang et al. 2023) is such a two-stage Deformable DETR with denoising in training. The package has a small one,
# on one map of stride 8. Each row is a decoder layer. The cross is the reference point, the dots are the sampling
# points of all heads, colored by weight, and the green box is the layer's prediction.

# %%
dino = vitkit.load("shapes_dino")
sampling = image_sampling(dino, image)
query = confident(sampling.queries)[0]
sampling.draw_query(query, out / "sampling.png")
show(out / "sampling.png")

# %%
samplings = [image_sampling(dino, other) for other in images]
ratios = [view.query_ratios(confident(view.queries)) for view in samplings if confident(view.queries)]
ratios = torch.cat(ratios, dim=1)
print_ratios("sampling points of a query in its box", ratios)
assert ratios.mean() > 5

# %% [markdown]
# ## Words in place of classes
#
# Grounding DINO (Liu et al. 2023) is DINO whose classes are the phrases of a text. In the encoder, image and words
# attend to each other; in the decoder, each query also reads the words, and the logit of a query and a word is their
# product. The package has a small one, which was trained on colors and shapes. Beside each box: what its query attends
# to in the text, and the probability of each word; the phrase with the highest mean is the label. Each query reads the
# words of its own phrase most. That is the rule, not a law: with another image or text, a query may read another phrase
# more than the one that its box is called by. The words of a phrase have nearly the same probabilities, as the text
# encoder lets them see each other, and nothing else. Below: where the words look. Each color looks at its own object;
# the word "triangle" looks at both objects, and at one place of the square more than at the triangle itself.

# %%
grounding = vitkit.load("shapes_grounding")
text = ["a pink square", "a cyan triangle", "a pink triangle", "a yellow circle"]
explanation = vitkit.explain(grounding, image=images[EXAMPLE], text=text, threshold=0.25, out=out / "words")
show(out / "words" / "image_box_words.png")
show(out / "words" / "image_word_locations.png")

# %%
for name, value in explanation.numbers.items():
    print(f"{name}: {value:.2f}")
words = explanation.prompt
detected = (words.scores.max(1).values > 0.25).nonzero()[:, 0].tolist()
assert len(detected) == 2
assert all(words.most_read(query) == words.scores[query].argmax() for query in detected)

# %% [markdown]
# ## Learning where to attend
#
# At the start of its training, DETR's queries attend everywhere, and it takes long until they have found out where to
# look. Sampling near a reference is a better start, and a proposal of the encoder as reference is a still better one.
# `vitkit ablate detr_convergence` trained each model on the same images, twice, in 7 to 14 minutes of one processor.
# These are the curves that it measured, from `model_zoo/ablations/detr_convergence.md`.

# %%
CURVES = {  # box AP after each of five epochs, of two runs
    "DETR": ((0.050, 0.134, 0.288, 0.414, 0.457), (0.031, 0.124, 0.269, 0.389, 0.448)),
    "Deformable DETR, one map": ((0.087, 0.227, 0.367, 0.493, 0.527), (0.098, 0.218, 0.350, 0.517, 0.544)),
    "Deformable DETR, four maps": ((0.128, 0.251, 0.423, 0.528, 0.553), (0.124, 0.274, 0.411, 0.510, 0.548)),
    "Deformable DETR, refined, two stages": ((0.202, 0.506, 0.647, 0.710, 0.726), (0.190, 0.485, 0.589, 0.696, 0.713)),
}
figure = Figure(figsize=(8, 3.6), layout="constrained")
axes = figure.subplots()
for number, (arm, curves) in enumerate(CURVES.items()):
    for label, curve in zip((arm, None), curves):
        axes.plot(range(1, 6), curve, color=f"C{number}", marker="o", label=label)
final = {arm: max(curve[-1] for curve in curves) for arm, curves in CURVES.items()}
axes.set(xlabel="epochs of 6400 images", ylabel="box AP on new images", ylim=(0, None), xticks=range(1, 6))
axes.legend()
axes.grid(alpha=0.3)
figure.savefig(out / "convergence.png", dpi=110)
show(out / "convergence.png")
for arm, value in final.items():
    print(f"{arm:38} AP {value:.3f}")
assert min(final, key=final.get) == "DETR"

# %% [markdown]
# ## Where to go from here
#
# - `vitkit explain detr_r50 --image street.jpg --html` draws all of this for the published DETR on your own photograph.
# - `vitkit explain runs/detr --dataset` draws the locations of each query's boxes over a dataset.
# - `configs/quickstart/dino.py` adds DINO's later techniques: denoising, mixed query selection, look forward twice.
