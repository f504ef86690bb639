# %% [markdown]
# # A Transformer that translates numbers
#
# Notebook 1 ended with multi-head attention. Here, a complete Transformer (Vaswani et al. 2017) learns to translate
# English number words into German, and we look at its parts: how positions are encoded, what its masks hide, what its
# heads attend to, and how it selects the next token. The training takes less than a minute;
# `configs/quickstart/translation.py` is the same run at full length.

# %%
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import nn

import vitkit
from vitkit.apps.explanations.text import draw_beam_tree, text_attention, text_inputs
from vitkit.apps.explanations.text_drawing import (
    animate_decoding,
    draw_alignment,
    draw_arcs,
    draw_expected,
    draw_heads,
    draw_positions,
)
from vitkit.apps.visualization.notebooks import show
from vitkit.nn.attention import MultiHeadAttention, attend, attention_weights, mask_bias, padding_bias
from vitkit.nn.position import sine_positions_1d
from vitkit.seq2seq.transformer import causal_bias

out = Path("figures/transformer")
out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# %% [markdown]
# ## Attention has no order, and no parameters of its own
#
# An output of attention is a weighted sum, which does not depend on the order of its terms. If the tokens $X$ are
# permuted, the outputs are the same ones, permuted in the same way: attention is *permutation-equivariant*,
#
# $$\operatorname{Attention}(PX) = P \operatorname{Attention}(X).$$
#
# It has no parameters either. Those of an attention layer are the projections before and after it, which see one token
# at a time: their number does not depend on the number of tokens.

# %%
x, order = torch.randn(1, 10, 32), torch.randperm(10)
layer, positions = MultiHeadAttention(32, num_heads=4), sine_positions_1d(10, 32)
sizes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
print("parameters of a layer with 32 channels, for any number of tokens:", sizes)


def largest_difference(function, x):
    """The largest difference between the outputs of permuted tokens and the permuted outputs."""
    return float((function(x[:, order]) - function(x)[:, order]).abs().max())


functions = {
    "attend, which has no parameters": lambda x: attend(x[:, None], x[:, None], x[:, None])[:, 0],
    "a layer with projections": lambda x: layer(x, x, x),
    "the layer, after positions are added": lambda x: layer(x + positions, x + positions, x + positions),
}
with torch.no_grad():
    differences = {name: largest_difference(function, x) for name, function in functions.items()}
for name, difference in differences.items():
    print(f"{name:38} differs by {difference:.1e}")
assert differences["a layer with projections"] < 1e-5 < differences["the layer, after positions are added"]

# %% [markdown]
# ## Positions
#
# So that order matters, each position $p$ gets an encoding, which is added to the token's embedding: sines and cosines
# of decreasing frequencies,
#
# $$PE_{p, 2i} = \sin\!\left(p / 10000^{2i/d}\right), \qquad PE_{p, 2i+1} = \cos\!\left(p / 10000^{2i/d}\right).$$
#
# Each row of the figure is a position, each column a channel. The first channels change from one position to the next,
# the last ones hardly change over the whole sentence, like the low and high digits of a number.

# %%
codes = sine_positions_1d(60, 128)
draw_positions(codes, out / "positions.png", title="Sine positions, d = 128")
show(out / "positions.png")

# %% [markdown]
# The dot product of two encodings depends only on their offset $k$, because $\sin a \sin b + \cos a \cos b = \cos(a -
# b)$:
#
# $$PE_p^\top PE_{p+k} = \sum_{i=0}^{d/2-1} \cos\!\left(k / 10000^{2i/d}\right).$$
#
# This lets a head learn to attend to the previous token at any position.

# %%
products = codes @ codes.T
offsets = range(-20, 21)
figure = Figure(figsize=(6, 3), layout="constrained")
axes = figure.subplots()
for p in (20, 30, 39):
    axes.plot(offsets, [float(products[p, p + k]) for k in offsets], label=f"p = {p}", linewidth=5 - 0.1 * p)
axes.set(xlabel="offset k", ylabel="scalar product", title="The same curve at each position")
axes.legend()
axes.grid(alpha=0.3)
figure.savefig(out / "offsets.png", dpi=110)
show(out / "offsets.png")

# %% [markdown]
# ## Masks
#
# Two kinds of tokens must be masked. Sentences of a batch are padded to one length, and padding must not be attended
# to. And in training the decoder gets the whole target at once, but a token may only depend on those before it. Both
# masks are biases on the scores: 0 where a key is visible, and a very negative number where it is masked, so that its
# softmax weight is 0.
#
# In vitkit, a mask is always `True` where a key is masked, and is converted to a bias in one function, `mask_bias`.

# %%
scores = torch.zeros(1, 1, 6, 6)  # all tokens fit equally well
is_padding = torch.tensor([[False, False, False, False, True, True]])
window = (torch.arange(6)[:, None] - torch.arange(6)).abs() > 1  # hides all but the neighbors
biases = {
    "padding": padding_bias(is_padding),
    "causal": causal_bias(6, scores.device),
    "a band, by hand": mask_bias(window),
}
figure = Figure(figsize=(9.6, 3.6), layout="constrained")
panels = figure.subplots(1, 3)
for panel, (name, bias) in zip(panels, biases.items()):
    weights = np.ma.masked_equal(attention_weights(scores, bias)[0, 0].numpy(), 0)
    shown = panel.imshow(weights, vmin=0, vmax=1, cmap=colormaps["viridis"].with_extremes(bad="0.9"))
    panel.set(title=name, xlabel="key", ylabel="query")
figure.colorbar(shown, ax=panels, label="weight; gray: masked, exactly 0", shrink=0.8)
figure.suptitle("Weights of equal scores under three masks")
figure.savefig(out / "masks.png", dpi=110)
show(out / "masks.png")

# %% [markdown]
# ## What one output sees
#
# Which inputs does output $i$ depend on? The derivative $\partial y_i / \partial x_j$ answers this for any network: it
# is zero where input $j$ is not seen. The figure shows its magnitude for stacks of one and of three layers with random
# weights, each row relative to its maximum, and black where it is zero.
#
# - A *convolution* of three tokens sees one neighbor on each side, and each further layer one more. Distant tokens
#   meet only after many layers.
# - *Recurrence* sees all tokens before, but only through the states between: the influence of a token fades with every
#   step, and the steps must be computed one after another.
# - *Self-attention* sees every token in one step at any distance, and with the causal mask every token before.
#
# Here, the layers have no residual connections. So three layers of attention, whose weights are nearly uniform before
# training, are means of means: all outputs are nearly the same mean of all tokens. Under the causal mask, the first
# tokens count most, because every mean contains them.

# %%
LENGTH, CHANNELS = 32, 16


class Convolution(nn.Conv1d):
    """A convolution over three tokens."""

    def forward(self, x):
        return super().forward(x.mT).mT.tanh()


class Recurrence(nn.GRU):
    """A recurrent network that reads from left to right."""

    def forward(self, x):
        return super().forward(x)[0]


class SelfAttention(MultiHeadAttention):
    """Attention among the tokens, of all or only of those before."""

    bias = None

    def forward(self, x):
        return super().forward(x, x, x, bias=self.bias)


class CausalSelfAttention(SelfAttention):
    bias = causal_bias(LENGTH, torch.device("cpu"))


kinds = {
    "convolution": lambda: Convolution(CHANNELS, CHANNELS, 3, padding=1),
    "recurrence (GRU)": lambda: Recurrence(CHANNELS, CHANNELS, batch_first=True),
    "self-attention": lambda: SelfAttention(CHANNELS, 4),
    "causal self-attention": lambda: CausalSelfAttention(CHANNELS, 4),
}
tokens = torch.randn(1, LENGTH, CHANNELS)
colors = colormaps["viridis"].with_extremes(bad="black")
figure = Figure(figsize=(11, 5.6), layout="constrained")
panels = figure.subplots(2, len(kinds), sharex=True, sharey=True)
for row, depth in zip(panels, (1, 3)):
    for panel, (name, kind) in zip(row, kinds.items()):
        stack = nn.Sequential(*(kind() for _ in range(depth)))
        jacobian = torch.autograd.functional.jacobian(stack, tokens)[
            0, :, :, 0
        ]  # (outputs, channels, inputs, channels)
        sees = jacobian.norm(dim=(1, 3))  # (outputs, inputs)
        relative = (sees / sees.amax(dim=1, keepdim=True)).numpy()
        shown = panel.imshow(np.ma.masked_equal(relative, 0), norm=LogNorm(1e-4, 1), cmap=colors)
        panel.set(title=f"{depth} x {name}" if depth > 1 else name, xlabel="input", ylabel="output")
        middle = relative[LENGTH // 2]
        print(f"{depth} x {name:22} output 16 sees {int((middle > 0).sum()):2} of 32; input 0 counts {middle[0]:.1e}")
figure.colorbar(shown, ax=panels, label="relative size of the derivative")
figure.savefig(out / "sees.png", dpi=110)
show(out / "sees.png")

# %% [markdown]
# ## Layer norm, not batch norm
#
# Both subtract a mean and divide by a standard deviation. **Layer norm** takes them over the channels of one token;
# **batch norm** takes them for each channel over all tokens of all sequences in the batch. In images, each of which
# fills its tensor, the second works well. Sequences have different lengths: then the statistics of batch norm contain
# the other sequences and the padding.
#
# The figure shows, as above, which inputs the third token of the first sequence depends on. The batch has three
# sequences of 8, 3 and 5 tokens; the rest is padding.

# %%
lengths = [8, 3, 5]
batch = 1 + torch.randn(len(lengths), max(lengths), CHANNELS)
for row, length in zip(batch, lengths):
    row[length:] = 0
norms = {
    "layer norm": lambda x: nn.functional.layer_norm(x, (CHANNELS,)),
    "batch norm": lambda x: nn.functional.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x),
}
figure = Figure(figsize=(9, 2.6), layout="constrained")
for panel, (name, norm) in zip(figure.subplots(1, 2), norms.items()):
    jacobian = torch.autograd.functional.jacobian(lambda x, norm=norm: norm(x)[0, 2], batch)
    depends = jacobian.norm(dim=(0, 3))  # (sequences, tokens)
    panel.imshow(np.ma.masked_equal(depends.numpy(), 0), norm=LogNorm(1e-2, 1), cmap=colors)
    for y, length in enumerate(lengths):
        for x in range(length, max(lengths)):
            panel.text(x, y, "pad", ha="center", va="center", fontsize=7, color="white")
    panel.set(title=name, xlabel="token", ylabel="sequence", yticks=range(len(lengths)))
    alone, longer = batch[:1], nn.functional.pad(batch, (0, 0, 0, 8))
    change = [float((norm(x)[0, 2] - norm(batch)[0, 2]).abs().max()) for x in (alone, longer)]
    print(f"{name}: the third token depends on {int((depends > 0).sum())} of {depends.numel()} tokens; it changes by")
    print(f"  {change[0]:.3f} without the other sequences, by {change[1]:.3f} with 8 more tokens of padding")
    assert (max(change) < 1e-6) == (name == "layer norm")
figure.savefig(out / "norms.png", dpi=110)
show(out / "norms.png")

# %% [markdown]
# The output of layer norm depends on its own token only, so a sentence gets the same result in any batch. That of batch
# norm depends on all of them. In evaluation, batch norm replaces the batch's statistics by running averages, which
# contain as much padding as the training batches happened to have.
#
# ## Residual connections
#
# Each part of a Transformer block adds its output to its input, $x + f(\operatorname{norm}(x))$, rather than replacing
# it. We train blocks with and without this sum to predict the symbol to the left in a sequence of random symbols, as in
# notebook 1: two blocks, and twelve.

# %%
SYMBOLS, RING, WIDTH = 8, 12, 32


class Block(nn.Module):
    """Self-attention and a feed-forward network, each after a layer norm, with or without residual connections."""

    def __init__(self, residual):
        super().__init__()
        self.residual = residual
        self.attention = MultiHeadAttention(WIDTH, 4)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x):
        y = self.norms[0](x)
        y = self.attention(y, y, y)
        x = x + y if self.residual else y
        y = self.feed_forward(self.norms[1](x))
        return x + y if self.residual else y


def train_blocks(depth, residual, steps=250):
    """Train a stack of blocks: the loss of each step, and how much the tokens differ before training, by block."""
    torch.manual_seed(0)
    embedding, classify = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, SYMBOLS)
    blocks = nn.ModuleList([Block(residual) for _ in range(depth)])
    optimizer = torch.optim.AdamW(nn.ModuleList([embedding, blocks, classify]).parameters(), lr=1e-3)
    losses, differences = [], None
    for _ in range(steps):
        symbols = torch.randint(SYMBOLS, (32, RING))
        x = embedding(symbols) + sine_positions_1d(RING, WIDTH)
        outputs = [x := block(x) for block in blocks]
        loss = nn.functional.cross_entropy(classify(x).flatten(0, 1), symbols.roll(1, 1).flatten())
        if differences is None:
            from_mean = [y.detach() - y.detach().mean(1, keepdim=True) for y in outputs]
            differences = [float(d.norm() / y.detach().norm()) for d, y in zip(from_mean, outputs)]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, differences


figure = Figure(figsize=(10, 3.4), layout="constrained")
curves, at_start = figure.subplots(1, 2)
final = {}
for depth, style in ((2, "--"), (12, "-")):
    for residual, color in ((True, "tab:blue"), (False, "tab:red")):
        losses, differences = train_blocks(depth, residual)
        name = f"{depth} blocks, {'with' if residual else 'without'} residuals"
        smooth = np.convolve(losses, np.ones(10) / 10, mode="valid")
        final[depth, residual] = float(smooth[-1])
        curves.plot(smooth, style, color=color, label=name)
        at_start.plot(range(1, depth + 1), differences, style, color=color, marker=".", label=name)
        print(f"{name}: loss {final[depth, residual]:.2f} at the end, guessing has {np.log(SYMBOLS):.2f}")
        print(
            f"  before training, the fraction of a token that differs from their mean is {differences[-1]:.1e} "
            "at the end"
        )
assert final[12, True] < 0.1 and final[12, False] > 0.9 * np.log(SYMBOLS)
curves.set(xlabel="step", title="loss")
at_start.set(xlabel="block", title="difference between tokens, before training", yscale="log")
at_start.legend(fontsize=8)
for panel in (curves, at_start):
    panel.grid(alpha=0.3)
figure.savefig(out / "residuals.png", dpi=110)
show(out / "residuals.png")

# %% [markdown]
# Without residual connections, each block replaces the tokens by averages of all tokens, so that they become more alike
# from block to block, as in the figure of what an output sees. After three such blocks, their differences are as small
# as the rounding errors. Nothing is left from which the left neighbor could be learned, and the model guesses. With
# residual connections, a token keeps what it was, and twelve blocks learn the task almost as quickly as two.
#
# ## Training
#
# The model has two layers each in the encoder and the decoder, with four heads and 128 channels, and pre-norm
# (`norm_first`), which learns faster in such a short run. The tokens are subwords, learned from the training text by
# byte pair encoding and shared by both languages. As in notebook 1, the parts of compounds are separate words. The
# numbers in the validation data are not in the training data.

# %%
run = vitkit.train(
    "quickstart/translation",
    data=dict(
        train=dict(num_pairs=10000, compound=False), val=dict(num_pairs=300, compound=False), tokens_per_gpu=1024
    ),
    train=dict(epochs=3, eval_every=1, reference_batch_size=1024),
)
print({name: round(run.metrics[name], 3) for name in ("exact_match", "chrf")})
show(run.path / "curves.png")

# %% [markdown]
# The run's folder has all that is needed to use the model. `run.load()` returns the same as
# `vitkit.load("runs/translation")` in another program: a translator from text to text.

# %%
translator = run.load()
for number in ("seven", "twenty one", "one hundred twenty three", "forty five thousand six hundred seventy eight"):
    print(f"{number:48} {translator(number)}")

# %% [markdown]
# ## What the model attends to
#
# `text_attention` runs the model on one sentence and returns the attention weights of all layers with their tokens, and
# the decoder's predictions at each step. There are three kinds of attention: among the source tokens (encoder), among
# the tokens written so far (decoder), and from these to the source tokens (cross).
#
# With `words=True`, subwords are joined to words: a word's row is the mean of its tokens' rows, and its column the sum
# of their columns. The figures below are of words.

# %%
text = "one hundred twenty three"
pieces = text_attention(translator.model, translator.vocabularies, text)
attention = text_attention(translator.model, translator.vocabularies, text, words=True)
for layer, joined in zip(pieces.layers, attention.layers):
    print(layer.kind, layer.number, "heads, rows, columns:", tuple(layer.weights.shape), tuple(joined.weights.shape))
print("subwords:", *pieces.of_kind("cross")[0].columns)
print("words:", *attention.of_kind("cross")[0].columns)

# %%
encoder = attention.of_kind("encoder")
rows = encoder[0].rows
draw_heads([x.weights.numpy() for x in encoder], rows, rows, out / "encoder.png", title="Encoder, by layer and head")
show(out / "encoder.png")

# %% [markdown]
# The same for the decoder's second layer, as lines from each token on the left to the tokens on the right that it
# attends to. Because of the causal mask, no line leads down.

# %%
decoder = attention.of_kind("decoder")[-1]
draw_arcs(decoder.weights.numpy(), decoder.rows, decoder.columns, out / "decoder.png", title="Decoder, last layer")
show(out / "decoder.png")

# %% [markdown]
# Cross-attention corresponds to the alignment of notebook 1. `align` returns the mean over the heads of the second to
# last layer, here the first.

# %%
draw_alignment(*translator.align(text, words=True), out / "alignment.png")
show(out / "alignment.png")

# %% [markdown]
# ## One token after another
#
# A translation $y$ of $x$ is written token by token, $p(y \mid x) = \prod_t p(y_t \mid y_{<t}, x)$. Each panel is one
# factor: the five most probable next tokens. Where the model is certain, there is a single bar. These are subwords; ␣
# is the space before a word, so tokens without it continue one.

# %%
draw_expected(pieces.expected, out / "next_tokens.png", title=f"What may come next: {text}")
show(out / "next_tokens.png")

# %% [markdown]
# The same as an animation, a frame for each token: the source is shaded by cross-attention (mean of the heads of the
# layer whose alignment was drawn above), and the bars are the most probable next tokens.

# %%
cross = pieces.of_kind("cross")[0]
animate_decoding(cross.columns, cross.rows, cross.weights.mean(0), pieces.expected, out / "decoding.gif")
show(out / "decoding.gif")

# %% [markdown]
# Greedy decoding takes the best token at each step, and may miss a more probable sentence. Beam search keeps the $k$
# best prefixes and extends all of them; hypotheses are compared by the sum of their log probabilities, divided by a
# length penalty. In the tree, the number below each token is the log probability of the sequence up to it, and the best
# hypothesis is green. A text may appear twice, split into different subwords.

# %%
inputs = text_inputs(translator.model, translator.vocabularies, "twenty one")
draw_beam_tree(translator.model, translator.vocabularies["target"], inputs, out / "beams.png", beams=3)
show(out / "beams.png")

# %%
for score, candidate in translator("twenty one", beams=3, n_best=3).n_best:
    print(f"{score:7.3f}  {candidate}")

# %% [markdown]
# ## Where to go from here
#
# - The same figures for any run, also as an HTML page in which pointing at a token shows what it attends to:
#   `vitkit explain runs/translation --text "one hundred twenty-three" --html`.
# - `vitkit analyze configs/quickstart/translation.py` counts parameters and multiplications by part.
# - Notebook 3 generates image captions.
