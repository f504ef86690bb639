# %% [markdown]
# # A Transformer that translates numbers
#
# Notebook 1 ended with multi-head attention. Here, a complete Transformer (Vaswani et al. 2017) learns to translate
# English number words into German, and we look at its parts: how positions are encoded, what its masks hide, what its
# heads attend to, and how it selects the next token. The training takes less than a minute;
# `configs/quickstart/translation.py` is the same run at full length.

# %%
from pathlib import Path

import torch
from matplotlib.figure import Figure

import vitkit
from vitkit.explanations.text import draw_beam_tree, text_attention, text_inputs
from vitkit.explanations.text_drawing import draw_alignment, draw_arcs, draw_expected, draw_heads, draw_positions
from vitkit.nn.attention import attention_weights, mask_bias, padding_bias
from vitkit.nn.position import sine_positions_1d
from vitkit.seq2seq.transformer import causal_bias
from vitkit.visualization.notebooks import show

out = Path("pictures/transformer")
torch.manual_seed(0)

# %% [markdown]
# ## Positions
#
# Attention is a weighted sum, which does not depend on the order of its terms. So each position $p$ gets an encoding,
# which is added to the token's embedding: sines and cosines of decreasing frequencies,
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
window = (torch.arange(6)[:, None] - torch.arange(6)).abs() > 1  # hides all but the neighbours
biases = {
    "padding": padding_bias(is_padding),
    "causal": causal_bias(6, scores.device),
    "a band, by hand": mask_bias(window),
}
figure = Figure(figsize=(9, 3.8), layout="constrained")
for panel, (name, bias) in zip(figure.subplots(1, 3), biases.items()):
    panel.imshow(attention_weights(scores, bias)[0, 0], vmin=0, vmax=1, cmap="magma")
    panel.set(title=name, xlabel="key", ylabel="query")
figure.suptitle("Weights of equal scores under three masks")
figure.savefig(out / "masks.png", dpi=110)
show(out / "masks.png")

# %% [markdown]
# ## Training
#
# The model has two layers each in the encoder and the decoder, with four heads and 128 channels, and pre-norm
# (`norm_first`), which learns faster in such a short run. The tokens are subwords, learned from the training text by
# byte pair encoding and shared by both languages. The numbers in the validation data are not in the training data.

# %%
run = vitkit.train(
    "quickstart/translation",
    data=dict(train=dict(num_pairs=10000), val=dict(num_pairs=300), tokens_per_gpu=1024),
    train=dict(epochs=3, eval_every=1, reference_batch_size=1024),
)
print({name: round(run.metrics[name], 3) for name in ("exact_match", "chrf")})
show(run.path / "curves.png")

# %% [markdown]
# The run's folder has all that is needed to use the model. `run.load()` returns the same as
# `vitkit.load("runs/translation")` in another program: a translator from text to text.

# %%
translator = run.load()
for number in ("seven", "twenty-one", "one hundred twenty-three", "forty-five thousand six hundred seventy-eight"):
    print(f"{number:48} {translator(number)}")

# %% [markdown]
# ## What the model attends to
#
# `text_attention` runs the model on one sentence and returns the attention weights of all layers with their tokens, and
# the decoder's predictions at each step. There are three kinds of attention: among the source tokens (encoder), among
# the tokens written so far (decoder), and from these to the source tokens (cross).

# %%
text = "one hundred twenty-three"
attention = text_attention(translator.model, translator.vocabularies, text)
for layer in attention.layers:
    print(layer.kind, layer.number, tuple(layer.weights.shape), "(heads, tokens that attend, tokens attended to)")

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
draw_alignment(*translator.align(text), out / "alignment.png")
show(out / "alignment.png")

# %% [markdown]
# ## One token after another
#
# A translation $y$ of $x$ is written token by token, $p(y \mid x) = \prod_t p(y_t \mid y_{<t}, x)$. Each panel is one
# factor: the five most probable next tokens. Where the model is certain, there is a single bar.

# %%
draw_expected(attention.expected, out / "next_tokens.png", title=f"What may come next: {text}")
show(out / "next_tokens.png")

# %% [markdown]
# Greedy decoding takes the best token at each step, and may miss a more probable sentence. Beam search keeps the $k$
# best prefixes and extends all of them; hypotheses are compared by the sum of their log probabilities, divided by a
# length penalty. In the tree, the number below each token is the log probability of the sequence up to it, and the best
# hypothesis is green. A text may appear twice, split into different subwords.

# %%
inputs = text_inputs(translator.model, translator.vocabularies, "twenty-one")
draw_beam_tree(translator.model, translator.vocabularies["target"], inputs, out / "beams.png", beams=3)
show(out / "beams.png")

# %%
for score, candidate in translator("twenty-one", beams=3, n_best=3).n_best:
    print(f"{score:7.3f}  {candidate}")

# %% [markdown]
# ## Where to go from here
#
# - The same figures for any run, also as an HTML page in which pointing at a token shows what it attends to:
#   `vitkit explain runs/translation --text "one hundred twenty-three" --html`.
# - `vitkit analyze configs/quickstart/translation.py` counts parameters and multiplications by part.
# - Notebook 3 generates image captions.
