# %% [markdown]
# # MAE: learning from images without labels
#
# A masked autoencoder (He et al. 2021) removes three quarters of the patches of an image, encodes the rest by a ViT,
# and reconstructs what was removed by a small decoder. Nobody has to label the images: they are their own labels. This
# notebook draws what such a model reconstructs, measures how that depends on what it sees, and shows what it cannot
# know. `vitkit.load("shapes_mae")` comes with the package, trained to the end of its schedule on drawn shapes
# (`configs/quickstart/mae.py`).

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import vitkit
from vitkit.apps.explanations.reconstruction import reconstruct
from vitkit.apps.visualization.canvas import save_grid
from vitkit.apps.visualization.notebooks import show

out = Path("figures/mae")
mae = vitkit.load("shapes_mae")
model = mae.model
val_set = vitkit.build_dataset(dict(type="ShapesClassification", image_size=64, num_images=48, split="val"))
scenes = [val_set.scene(index) for index in range(len(val_set))]  # images that it has not seen
batch = mae.prepare([scene.image for scene in scenes]).inputs["images"]
GRID, SIDE = 8, 8  # patches a side, pixels a side

# %% [markdown]
# ## A mask, and the reconstruction
#
# Of 64 patches the encoder sees 16. It computes nothing for the others, so encoding takes about a quarter of the time
# that it would take with all of them. The decoder gets the encoder's output at the places of these 16, and the same
# learned vector, plus its position, at the 48 others.

# %%
vitkit.explain(mae, image=scenes[3].image, out=out)
show(out / "image_reconstruction.png")

# %% [markdown]
# The same image was masked in three ways. The loss is the squared error of the removed patches $P$ only, of pixels
# normalized by the mean $\mu_p$ and the standard deviation $\sigma_p$ of the true patch,
#
# $$\mathcal{L} = \frac{1}{|P|} \sum_{p \in P} \Bigl( \hat x_p - \frac{x_p - \mu_p}{\sigma_p} \Bigr)^2,$$
#
# here the mean over pixels. So the model is asked for the pattern of a patch, not for its brightness: predicting each
# patch's mean would cost 1. To draw the reconstruction, the true mean and contrast are put back, which is why even a
# patch of which the model knows nothing gets its color.
#
# ## How much must be removed?
#
# The curve is the mean loss of 48 images by the fraction that is removed. The model was trained at 0.75 only.


# %%
def losses_at(ratio):
    """Return the loss of each image with a fraction of its patches removed at random."""
    trained, model.mask_ratio = model.mask_ratio, ratio
    noise = torch.rand(len(batch), GRID**2, generator=torch.Generator().manual_seed(0))
    errors = reconstruct(model, batch, noise=noise).errors
    model.mask_ratio = trained
    return errors


ratios = [0.1, 0.25, 0.5, 0.75, 0.9]
means = [float(losses_at(ratio).mean()) for ratio in ratios]
print(*[f"{ratio:.0%} removed: loss {mean:.3f}" for ratio, mean in zip(ratios, means)], sep="\n")
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(ratios, means, marker="o")
axes.axhline(1, color="gray", linestyle="--", label="each patch's mean")
axes.set(xlabel="fraction of the patches that is removed", ylabel="loss of the removed patches", ylim=(0, 1.1))
axes.legend()
figure.savefig(out / "ratios.png", dpi=120, bbox_inches="tight")
show(out / "ratios.png")
assert means[0] < means[3] < means[4] < 0.7

# %% [markdown]
# Up to three quarters, it hardly matters how much is removed: images repeat themselves, and a quarter of the patches is
# nearly as good as nine tenths. That is why so much can be removed, and the paper shows that it must be, since with
# little removed it is enough to copy from the neighbors. What remains of the loss is mostly noise and fine texture, of
# which no other patch tells.
#
# ## What it does not know
#
# A removed patch can be reconstructed if what is seen determines it: a ground continues, an edge goes on. It cannot if
# nothing seen tells of it. Below, 16 patches are seen in both cases; in one of them none touches the shape, in the
# other five do. Where no patch of the shape is seen, the model has no reason to draw one: only the contrast of the true
# patches, which is put back, tells the viewer that something is there.


# %%
def touches_shape(scene):
    """Return for each patch whether it contains a part of the shape, (64,) bool."""
    mask = torch.as_tensor(scene.masks[0]).bool()
    return mask.unflatten(0, (GRID, SIDE)).unflatten(2, (GRID, SIDE)).any(3).any(1).flatten()


def order_of(shape, num_seen, seed):
    """Return an order of the patches in which the first 16 have `num_seen` ones of the shape."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(GRID**2, generator=generator)
    chosen = torch.where(shape)[0][torch.randperm(int(shape.sum()), generator=generator)]
    noise[chosen[:num_seen]] -= 1  # seen
    noise[chosen[num_seen:]] += 1  # removed
    return noise


shapes = [touches_shape(scene) for scene in scenes]
usable = [k for k, shape in enumerate(shapes) if 10 <= shape.sum() <= GRID**2 - 16]
hidden, partly = (
    reconstruct(model, batch[usable], noise=torch.stack([order_of(shapes[k], count, k) for k in usable]))
    for count in (0, 5)
)


def shape_error(result):
    """Return the squared error of the removed patches of the shapes, relative to that of drawing their means."""
    errors = []
    for row, k in enumerate(usable):
        removed = (result.removed[row].flatten() & shapes[k]).view(GRID, GRID)
        pixels = removed.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
        error = (result.predicted[row] - result.images[row])[:, pixels].square().mean()
        # Relative to drawing each patch in the mean of all its values, which is what the model is given.
        patches = result.images[row].unflatten(1, (GRID, SIDE)).unflatten(3, (GRID, SIDE))
        flat = (patches - patches.mean((0, 2, 4), keepdim=True)).flatten(1, 2).flatten(2)[:, pixels].square().mean()
        errors.append(float(error / flat))
    return float(np.mean(errors))


def to_rgb(image):
    return (image.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()


def seen_of(result, row):
    """Return an image with its removed patches gray."""
    gray = result.removed[row].repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
    return to_rgb(torch.where(gray, torch.tensor(0.5), result.images[row]))


panels, titles = [], []
for row in range(2):
    panels += [to_rgb(hidden.images[row])]
    titles += ["image"]
    for name, result in (("none of the shape", hidden), ("5 patches of it", partly)):
        panels += [seen_of(result, row), to_rgb(result.predicted[row])]
        titles += [f"seen: {name}", "reconstruction"]
save_grid(panels, titles, out / "unknown.png", per_line=5, panel=200)
show(out / "unknown.png")
print(f"error of the shapes' removed patches, relative to that of their means, over {len(usable)} images:")
print(f"none of it seen {shape_error(hidden):.2f}, 5 patches of it seen {shape_error(partly):.2f}")
assert shape_error(partly) < 0.6 < 0.9 < shape_error(hidden)

# %% [markdown]
# A squared error has one answer. Where several shapes are possible, the best prediction is their mean, which is none of
# them: that is why reconstructions are blurred, and why an MAE is no model that draws images. How the answer depends on
# the mask shows what is uncertain: below are the mean of 32 reconstructions of an image, each with another mask, and
# their standard deviation.

# %%
one = batch[3:4].expand(32, -1, -1, -1)
many = reconstruct(model, one, noise=torch.rand(32, GRID**2, generator=torch.Generator().manual_seed(1)))
deviation = many.predicted.std(0).mean(0)
outline = torch.as_tensor(scenes[3].masks[0]).float()
spread = (deviation / deviation.max() * 255).byte()[..., None].expand(-1, -1, 3).numpy()
save_grid(
    [to_rgb(many.images[0]), to_rgb(many.predicted.mean(0)), spread],
    ["image", "mean of 32 reconstructions", "their standard deviation"],
    out / "spread.png",
    panel=200,
)
show(out / "spread.png")
edge = (torch.nn.functional.max_pool2d(outline[None], 5, 1, 2) - outline[None])[0] > 0
print(f"standard deviation {deviation[edge].mean():.3f} just outside of the shape, {deviation.mean():.3f} on average")
assert deviation[edge].mean() > deviation.mean()

# %% [markdown]
# ## What are the features worth?
#
# The decoder is thrown away. What is kept is the encoder: it has read many images, and a detector or classifier that
# starts from it needs fewer labels. `knn/top1` asks the nearest neighbors of an image for its class, without training
# anything on the features.

# %%
metrics = vitkit.test("shapes_mae", data=dict(val=dict(num_images=300)), device="cpu").metrics
print(f"knn/top1 {metrics['knn/top1']:.3f} over 300 images of six classes; guessing gives 0.17")
assert metrics["knn/top1"] < 0.4

# %% [markdown]
# That is hardly better than guessing. Reconstruction asks where colors and edges go, not what a shape is called, and
# the ground is most of an image. Such features are a start for fine-tuning rather than an answer: in the paper, ViT-B
# has 83.6 % top-1 on ImageNet fine-tuned, and 68.0 % with a linear classifier. Methods that compare views of an image
# (DINO, `vitkit train quickstart/self_distillation`) are better without fine-tuning.
#
# ## Where to go from here
#
# - `vitkit explain shapes_mae --image photo.png` draws the first figure for any image.
# - `vitkit pretrain photos --hours 1` trains an MAE on a folder of images, and says what its features are worth.
# - `configs/pretrain/mae.py` has the recipe of the paper, and `vitkit/models/mae.py` the model.
