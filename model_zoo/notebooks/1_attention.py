# %% [markdown]
# # Attention, from alignment to multi-head
#
# A model that translates must look back at the source while it writes. This notebook follows how that looking back was
# written down: as an additive score (Bahdanau et al. 2015), as a dot product (Luong et al. 2015), scaled, and in
# several heads (Vaswani et al. 2017). Each step is a few lines, and each draws its own picture. Everything runs on the
# CPU in about a minute.

# %%
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import vitkit
from vitkit import AttentionRecorder
from vitkit.nn.additive_attention import AlignmentAttention
from vitkit.nn.attention import MultiHeadAttention, attend
from vitkit.nn.position import sine_positions_1d
from vitkit.visualization.notebooks import show
from vitkit.visualization.text import draw_alignment, draw_heads

out = Path("pictures/attention")
torch.manual_seed(0)

# %% [markdown]
# ## A score for each pair
#
# A recurrent encoder has turned the source into states $h_1, \dots, h_S$. Before the decoder writes token $i$, its
# state $s_{i-1}$ is compared with each of them. The additive score is a small network with one hidden layer,
#
# $$e_{ij} = v^\top \tanh(W s_{i-1} + U h_j),$$
#
# a softmax over the source turns the scores into weights, and the decoder reads the weighted mean, the *context*:
#
# $$\alpha_{ij} = \frac{\exp e_{ij}}{\sum_{k=1}^{S} \exp e_{ik}}, \qquad c_i = \sum_{j=1}^{S} \alpha_{ij} h_j.$$
#
# In vitkit the score is a part of `AlignmentAttention`. $U h_j$ does not depend on $i$, so it is computed once per
# sentence, by `score.keys`.

# %%
states = torch.randn(1, 6, 16)  # (batch, source tokens, channels)
query = torch.randn(1, 1, 24)  # the decoder's state may have another size
attention = AlignmentAttention("additive", d_query=24, d_key=16)
context, weights = attention(query, attention.score.keys(states), states)
print(
    "context", tuple(context.shape), " weights", weights[0, 0].detach().numpy().round(2), " sum", float(weights.sum())
)
assert torch.allclose(context, weights @ states)

# %% [markdown]
# Untrained, all weights are nearly the same. So we train: a recurrent encoder and decoder that translate English number
# words into German ones, on pairs which vitkit generates. `vitkit.train` takes the name of a config and what to change
# in it; the run lies in a folder with its checkpoints, its log and its curves.

# %%
RNN = dict(type="RNNTranslator", d_embedding=64, d_hidden=128, decoding=dict(method="greedy", max_length=48))


def train_translator(score):
    """Train the recurrent translator with one of the alignment scores."""
    run = vitkit.train(
        "quickstart/translation",
        model=dict(RNN, attention=score),
        data=dict(train=dict(num_pairs=6000), val=dict(num_pairs=200), tokens_per_gpu=1024),
        train=dict(epochs=4, eval_every=4, reference_batch_size=1024),
    )
    print(score, {name: round(value, 3) for name, value in run.metrics.items()})
    return run.load()


additive = train_translator("additive")
print(additive("one hundred twenty-three"))

# %% [markdown]
# Now the weights mean something. Each row of the matrix is a token that the decoder wrote, each column one that it
# read; white is a weight of 1. German says *dreiundzwanzig*, three-and-twenty: the units come before the tens, so the
# path jumps ahead for *drei* and steps back for *zwanzig*. Nobody told the model which token belongs to which; the
# alignment is a by-product of learning to translate. It need not lie on the very letters: the encoder reads in both
# directions, so each of its states also knows what stands beside it.

# %%
draw_alignment(*additive.align("one hundred twenty-three"), out / "additive.png")
show(out / "additive.png")

# %% [markdown]
# ## The dot product
#
# The small network is evaluated for every pair. If queries and keys have the same size $d$, their dot product is a
# score without parameters of its own,
#
# $$e_{ij} = q_i^\top k_j,$$
#
# and all pairs together are one matrix product, $E = Q K^\top$. Processors are made for that. The same model, the same
# data, another score:

# %%
dot = train_translator("dot")
draw_alignment(*dot.align("one hundred twenty-three"), out / "dot.png")
show(out / "dot.png")

# %% [markdown]
# ## Why it is scaled
#
# If the components of $q$ and $k$ are independent with mean 0 and variance 1, then $q^\top k = \sum_{c=1}^{d} q_c k_c$
# has mean 0 and variance $d$. With many channels some scores are far larger than the others, the softmax puts nearly
# all weight on one key, and its gradient vanishes. Divided by $\sqrt d$ the scores have variance 1 for any $d$:
#
# $$\operatorname{Attention}(Q, K, V) = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt d}\right) V.$$
#
# The left panel shows the largest of 16 weights, the right one the mean size of the derivatives $\partial \alpha_j /
# \partial e_k$, which is what is left to learn from.

# %%
sizes = [2**n for n in range(1, 11)]
largest, gradient = {"unscaled": [], "scaled": []}, {"unscaled": [], "scaled": []}
for d in sizes:
    q, k = torch.randn(200, 1, d), torch.randn(200, 16, d)
    for name, scale in (("unscaled", 1.0), ("scaled", d**-0.5)):
        a = (scale * q @ k.mT).softmax(-1)[:, 0]  # (200, 16)
        jacobian = torch.diag_embed(a) - a[:, :, None] * a[:, None, :]
        largest[name].append(float(a.amax(-1).mean()))
        gradient[name].append(float(jacobian.abs().mean()))
figure = Figure(figsize=(9, 3.2), layout="constrained")
panels = figure.subplots(1, 2)
for panel, values, title in zip(panels, (largest, gradient), ("largest of 16 weights", "mean |derivative|")):
    for name, curve in values.items():
        panel.plot(sizes, curve, marker="o", label=name)
    panel.set_xscale("log", base=2)
    panel.set(xlabel="channels d", title=title, ylim=(0, None))
    panel.grid(alpha=0.3)
    panel.legend()
figure.savefig(out / "scale.png", dpi=110)
show(out / "scale.png")

# %% [markdown]
# `attend` is this formula, by the fastest kernel that the machine has, on tensors of shape (batch, heads, length,
# channels). By hand it is two lines:

# %%
q, k, v = torch.randn(1, 1, 5, 32), torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 32)
by_hand = (q @ k.mT / 32**0.5).softmax(-1) @ v
print("largest difference", float((attend(q, k, v) - by_hand).abs().max()))

# %% [markdown]
# ## Several heads
#
# One softmax gives one weighted mean. A token that needs two different things from two locations gets them mixed. So
# the channels are projected and split into $h$ heads of $d / h$ channels, each with weights of its own:
#
# $$\operatorname{head}_i = \operatorname{Attention}(Q W_i^Q, K W_i^K, V W_i^V), \qquad
# \operatorname{MultiHead}(Q, K, V) = [\operatorname{head}_1; \dots; \operatorname{head}_h]\, W^O.$$
#
# The cost is that of one head with all channels. vitkit's layer has the parameters of PyTorch's, so the two can be
# compared:

# %%
ours, theirs = MultiHeadAttention(32, num_heads=4), nn.MultiheadAttention(32, 4, batch_first=True)
ours.load_state_dict(theirs.state_dict())
x = torch.randn(2, 7, 32)
print("largest difference", float((ours(x, x, x) - theirs(x, x, x)[0]).abs().max()))

# %% [markdown]
# What is a second head good for? A small task tells: in a row of random symbols, predict at each position the symbol to
# its *left* and the one to its *right*, in this order. One head can spread its weight over both neighbours, but what it
# hands over is one weighted mean, from which it is hard to tell which symbol was left. Two heads can look at one
# neighbour each. (The row is a ring: the left neighbour of the first symbol is the last.)
#
# The model is one attention layer on embeddings with the Transformer's position encoding, which notebook 2 draws.

# %%
SYMBOLS, LENGTH, WIDTH = 8, 12, 64


class Neighbours(nn.Module):
    """Predict each symbol's left and right neighbour by one layer of attention."""

    def __init__(self, num_heads):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.attention = MultiHeadAttention(WIDTH, num_heads)
        self.classify = nn.Linear(WIDTH, 2 * SYMBOLS)
        self.register_buffer("positions", 2 * sine_positions_1d(LENGTH, WIDTH))

    def forward(self, symbols):
        values = self.embedding(symbols)
        where = values + self.positions
        read = self.attention(where, where, values)
        return self.classify(read).unflatten(-1, (2, SYMBOLS))  # (batch, length, left or right, symbols)


def neighbours_of(symbols):
    """The left and the right neighbour of each symbol, in a ring."""
    return torch.stack((symbols.roll(1, 1), symbols.roll(-1, 1)), dim=-1)


maps = {}
for num_heads in (1, 2):
    torch.manual_seed(1)
    model = Neighbours(num_heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(600):
        symbols = torch.randint(SYMBOLS, (64, LENGTH))
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 2), neighbours_of(symbols).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    symbols = torch.randint(SYMBOLS, (500, LENGTH))
    with torch.no_grad(), AttentionRecorder(model) as recorded:
        right = (model(symbols).argmax(-1) == neighbours_of(symbols)).float().mean()
    maps[num_heads] = recorded["attention"][0].mean(0).numpy()  # (heads, length, length), mean of the rows
    print(f"{num_heads} head(s): {right:.3f} of the neighbours are right, chance is {1 / SYMBOLS:.3f}")

# %% [markdown]
# `AttentionRecorder` collected the weights while the model ran: inside its `with` block every attention layer of any
# model leaves its weights under the layer's name, and the model need not be changed for it. The pictures are means over
# 500 rows of symbols.

# %%
positions = [str(n) for n in range(LENGTH)]
draw_heads([maps[1]], positions, positions, out / "one_head.png", title="One head must mix both neighbours")
show(out / "one_head.png")

# %%
draw_heads([maps[2]], positions, positions, out / "two_heads.png", title="Two heads share the work")
show(out / "two_heads.png")

# %% [markdown]
# ## Where to go from here
#
# - `configs/ablations/rnn_parts.py` trains the recurrent translator with each score and without attention (`vitkit
#   ablate rnn_parts`); the table is in `model_zoo/ablations/rnn_parts.md`.
# - `vitkit/nn/additive_attention.py` has all scores, `vitkit/nn/attention.py` the core that every model here uses.
# - Notebook 2 builds a whole Transformer from these heads.
