# %% [markdown]
# # Attention, from alignment to multi-head
#
# A translation model must look back at the source sentence while it writes. This notebook follows how attention was
# formulated over time: with an additive score (Bahdanau et al. 2015), with a dot product (Luong et al. 2015), and with
# scaled dot products in several heads (Vaswani et al. 2017). It begins with the idea that all of them share, a soft
# look-up in a dictionary. Each step is a few lines of code and a figure. Everything runs on the CPU in a minute or two.

# %%
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import vitkit
from vitkit import AttentionRecorder
from vitkit.apps.explanations.text import text_inputs
from vitkit.apps.explanations.text_drawing import draw_alignment, draw_heads
from vitkit.apps.inference.words import join_words
from vitkit.apps.visualization.notebooks import show
from vitkit.data.synthetic.number_words import english_number, german_number
from vitkit.nn.additive_attention import AlignmentAttention
from vitkit.nn.attention import MultiHeadAttention, attend
from vitkit.nn.position import sine_positions_1d
from vitkit.structures import BOS, EOS

out = Path("figures/attention")
out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# %% [markdown]
# ## A soft dictionary
#
# A dictionary returns the value whose key *equals* the query, and nothing if there is none. Attention is a look-up that
# always has an answer: it compares the query with every key, turns the scores into weights that sum to 1, and returns
# the weighted mean of all values. With dot products as scores, and a strength $\beta$,
#
# $$w_j = \frac{\exp(\beta\, q^\top k_j)}{\sum_i \exp(\beta\, q^\top k_i)}, \qquad
# \operatorname{look-up}(q) = \sum_j w_j v_j.$$
#
# As an example, the keys are four directions and the values are temperatures measured there. The query points 20
# degrees east of north, where nothing was measured.

# %%
directions = {"north": (0.0, 1.0), "east": (1.0, 0.0), "south": (0.0, -1.0), "west": (-1.0, 0.0)}
keys = torch.tensor(list(directions.values()))  # (4 keys, 2)
values = torch.tensor([[2.0], [10.0], [25.0], [14.0]])  # (4 keys, 1), in degrees Celsius


def look_up(queries, strength):
    """The weighted mean of the values for each query, and the weights."""
    weights = (strength * queries @ keys.T).softmax(-1)  # (queries, 4 keys)
    return weights @ values, weights


def pointing(degrees):
    """The unit vector at an angle from north, clockwise."""
    angle = torch.deg2rad(torch.as_tensor(degrees, dtype=torch.float32))
    return torch.stack((angle.sin(), angle.cos()), dim=-1)


query = pointing([20.0])
for strength in (0.0, 1.0, 4.0, 100.0):
    value, weights = look_up(query, strength)
    listed = ", ".join(f"{name} {float(w):.2f}" for name, w in zip(directions, weights[0]))
    print(f"strength {strength:5.0f}: {float(value):5.2f} degrees   weights: {listed}")
core = attend(query[None, None], keys[None, None], values[None, None], scale=4.0)  # vitkit's attention
assert torch.allclose(core[0, 0], look_up(query, 4.0)[0])

# %% [markdown]
# With strength 0, the answer is the mean of all values; with a large one, it is the value of the nearest key, as in a
# dictionary. In between, it is a smooth function of the query, the keys and the values, so all three can be learned by
# gradient descent. The look-up itself has no parameters.

# %%
angles = torch.arange(0.0, 361.0)
figure = Figure(figsize=(6.5, 3.2), layout="constrained")
axes = figure.subplots()
for strength in (1.0, 4.0, 100.0):
    axes.plot(angles, look_up(pointing(angles), strength)[0], label=f"strength {strength:.0f}")
axes.plot([0, 90, 180, 270], values, "ko", label="stored values")
axes.set(xlabel="direction of the query, degrees from north", ylabel="answer, degrees C", xticks=range(0, 361, 90))
axes.legend()
axes.grid(alpha=0.3)
figure.savefig(out / "dictionary.png", dpi=110)
show(out / "dictionary.png")

# %% [markdown]
# ## A score for each pair
#
# A recurrent encoder has turned the source into states $h_1, \dots, h_S$. Before the decoder writes token $i$, its
# state $s_{i-1}$ is compared with each of them. The additive score is a small network with one hidden layer,
#
# $$e_{ij} = v^\top \tanh(W s_{i-1} + U h_j),$$
#
# a softmax over the source turns the scores into weights, and the decoder reads the weighted mean, called the
# *context*:
#
# $$\alpha_{ij} = \frac{\exp e_{ij}}{\sum_{k=1}^{S} \exp e_{ik}}, \qquad c_i = \sum_{j=1}^{S} \alpha_{ij} h_j.$$
#
# In vitkit, the score is a part of `AlignmentAttention`. $U h_j$ does not depend on $i$, so `score.keys` computes it
# once per sentence.

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
# Without training, all weights are nearly the same. So we train a recurrent encoder and decoder to translate English
# number words into German, on pairs generated by vitkit. In German, 23 is *dreiundzwanzig*, three-and-twenty: the units
# come before the tens. `compound=False` writes the parts of such compounds as words, and each word is a token, so that
# the figures show which word belongs to which. `vitkit.train` takes the name of a config and the values to change; the
# run is a folder with its checkpoints, log and training curves.

# %%
exact_match = {}
RNN = dict(type="RNNTranslator", d_embedding=64, d_hidden=128, decoding=dict(method="greedy", max_length=48))


def train_translator(score):
    """Train the recurrent translator with one of the alignment scores."""
    run = vitkit.train(
        "quickstart/translation",
        model=dict(RNN, attention=score),
        data=dict(
            train=dict(num_pairs=6000, compound=False, vocabulary=dict(kind="word", size=None, shared=False)),
            val=dict(num_pairs=200, compound=False),
            tokens_per_gpu=1024,
        ),
        train=dict(epochs=8, eval_every=8, reference_batch_size=1024),
    )
    exact_match[score] = run.metrics["exact_match"]
    print(f"{score}: {exact_match[score]:.1%} of the numbers are right, chrF {run.metrics['chrf']:.1f}")
    return run.load()


additive = train_translator("additive")
text = "one hundred twenty three"
print(additive(text))

# %% [markdown]
# The weights now show an alignment. Each row of the matrix is a word that the decoder wrote, each column a word of the
# source; white is a weight of 1, and `</s>` is the end of the sentence. The path jumps ahead for *drei* and back for
# *zwanzig*. The model was never told which words correspond; the alignment is a by-product of learning to translate.
# It is not perfectly sharp: the encoder reads in both directions, so each of its states also contains information about
# neighboring words. *und*, which has no counterpart, divides its attention.

# %%
draw_alignment(*additive.align(text, words=True), out / "additive.png")
show(out / "additive.png")

# %% [markdown]
# One sentence may be a lucky one. In a number from 100 to 999 with tens and units, the tens and the units are the last
# two words of the source, and in the translation the last and the third from the end. How often does the largest weight
# of each lie on its counterpart?


# %%
def counterparts(translator):
    """Print how often the units and the tens attend most to their counterparts, and return the lower fraction."""
    numbers = [number for number in range(121, 1000, 6) if number % 100 > 20 and number % 10]
    hits, weights, count = torch.zeros(2), torch.zeros(2), 0
    for number in numbers:
        attention, source, target = translator.align(english_number(number, compound=False), words=True)
        if " ".join(target) != german_number(number, compound=False):
            continue
        units, tens = attention[-3], attention[-1]  # rows of the words that the decoder wrote
        weights += torch.stack((units[-2], tens[-3]))  # columns: ..., tens, units, end of the sentence
        hits += torch.tensor([units.argmax() == len(source) - 2, tens.argmax() == len(source) - 3])
        count += 1
    print(f"{count} of {len(numbers)} numbers are translated correctly; in these:")
    for name, hit, weight in zip(("units", "tens"), hits / count, weights / count):
        print(f"  {name}: the largest weight is on their counterpart in {hit:.0%}, which has {weight:.2f} on average")
    return float(hits.min() / count)


assert counterparts(additive) > 0.9

# %% [markdown]
# ## The decoder, unrolled in five steps
#
# `additive("...")` hides what happens between the tokens. We take the trained model apart and write each step by hand.
#
# **Step 1: a fixed context.** Without attention, the encoder's last state is the only thing that the decoder gets to
# know about the source: the same context $c = h_S$ at every step, however long the sentence is. We train this model
# too, on the same data.

# %%
fixed = train_translator(None)
assert exact_match[None] < exact_match["additive"] - 0.3
val_set = vitkit.build_dataset(dict(type="NumberWords", num_pairs=200, split="val", compound=False))
mistakes = [pair for pair in zip(*val_set.sides) if str(fixed(pair[0])) != pair[1]][:3]
for english, german in mistakes:
    print(f"{english}\n  fixed context: {fixed(english)}")
    print(f"  attention:     {additive(english)}\n  correct:       {german}")

# %% [markdown]
# It translates far fewer numbers correctly: one vector of 128 channels must hold the whole sentence. Above are the
# first three validation numbers that it gets wrong. Its mistakes have the right form and wrong digits. The remaining
# steps give the decoder a new context at every step.
#
# **Step 2: scores.** The encoder's states are kept, and the decoder's state $s_{i-1}$ is compared with each of them.
# **Step 3: weights.** A softmax turns the scores into weights that sum to 1.
# **Step 4: a context per step.** The weighted mean of the states is what the decoder reads beside its last token.
# **Step 5: the alignment.** The weights of all steps, one below the other, are the matrix above.


# %%
def unroll(translator, text):
    """Translate a text greedily, token by token: the tokens, and what each step read of the source's states."""
    decoder, source = translator.model.decoder, text_inputs(translator.model, translator.vocabularies, text)["source"]
    states, summary = translator.model.encoder(source)  # (1, S, C), (1, C)
    hidden = decoder.initial(summary).tanh()[None]  # s_0
    token, tokens, rows = BOS, [], []
    while token != EOS and len(tokens) < 48:
        if decoder.attention is None:
            weights = torch.eye(states.shape[1])[-1:]  # step 1: only the last state, which is the summary
            assert torch.equal(states[:, -1], summary)
        else:
            score = decoder.attention.score
            scores = score(hidden[-1], score.keys(states))  # step 2, e_i: (1, S)
            weights = scores.softmax(-1)  # step 3, alpha_i
        context = weights[:, None] @ states  # step 4, c_i: (1, 1, C)
        word = decoder.embedding(torch.tensor([[token]]))
        output, hidden = decoder.rnn(torch.cat((word, context), -1), hidden)  # s_i
        logits = decoder.output(decoder.maxout(torch.cat((output, word, context), -1)).unflatten(-1, (-1, 2)).amax(-1))
        token = int(logits.argmax())
        tokens.append(token)
        rows.append(weights[0])
    return tokens, torch.stack(rows)  # step 5: (T, S)


alignment = additive.align(text)
with torch.no_grad():
    tokens, weights = unroll(additive, text)
    fixed_tokens, fixed_weights = unroll(fixed, text)
written = additive.vocabularies["target"].token_texts(tokens)
assert written[:-1] == list(alignment.target_tokens)  # which leave out the end of the sentence
assert torch.allclose(weights[:-1], alignment.attention, atol=1e-5)
written, source_words = join_words(written), join_words(alignment.source_tokens)
for word, row in zip(written, weights):
    print(f"writes {word:8} with the largest weight, {float(row.max()):.2f}, at {source_words[int(row.argmax())]}")

# %% [markdown]
# By hand, we get the model's own words and weights. Both figures show what each written word reads: always the last
# state without attention, and the states that it needs with attention.

# %%
fixed_written = join_words(fixed.vocabularies["target"].token_texts(fixed_tokens))
figure = Figure(figsize=(9, 5.4), layout="constrained")
panels = figure.subplots(1, 2)
for panel, rows, texts in zip(panels, (fixed_weights, weights), (fixed_written, written)):
    panel.imshow(rows, cmap="gray", vmin=0, vmax=1)
    panel.set_xticks(range(len(source_words)), source_words, rotation=90)
    panel.set_yticks(range(len(texts)), texts)
panels[0].set_title("a fixed context: the last state")
panels[1].set_title("a context per step: attention")
figure.savefig(out / "unrolled.png", dpi=110)
show(out / "unrolled.png")

# %% [markdown]
# ## The dot product
#
# The small network is evaluated for every pair. If queries and keys have the same size $d$, their dot product is a
# score without any parameters,
#
# $$e_{ij} = q_i^\top k_j,$$
#
# and the scores of all pairs are one matrix product, $E = Q K^\top$, which processors compute very efficiently. The
# same model on the same data, with this score; its alignment is even sharper:

# %%
dot = train_translator("dot")
draw_alignment(*dot.align(text, words=True), out / "dot.png")
show(out / "dot.png")
assert counterparts(dot) > 0.9

# %% [markdown]
# ## Why the scores are scaled
#
# If the components of $q$ and $k$ are independent with mean 0 and variance 1, then $q^\top k = \sum_{c=1}^{d} q_c k_c$
# has mean 0 and variance $d$. With many channels, some scores are far larger than the others, the softmax puts nearly
# all weight on one key, and its gradient vanishes. Divided by $\sqrt d$, the scores have variance 1 for any $d$:
#
# $$\operatorname{Attention}(Q, K, V) = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt d}\right) V.$$
#
# The left panel shows the largest of 16 weights, the right one the mean magnitude of the derivatives $\partial \alpha_j
# / \partial e_k$, through which the scores are trained.

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
# `attend` computes this formula with the machine's fastest kernel, on tensors of shape (batch, heads, length,
# channels). Written out, it is one line:

# %%
q, k, v = torch.randn(1, 1, 5, 32), torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 32)
by_hand = (q @ k.mT / 32**0.5).softmax(-1) @ v
print("largest difference", float((attend(q, k, v) - by_hand).abs().max()))

# %% [markdown]
# ## Several heads
#
# One softmax gives one weighted mean. A token that needs different information from two positions gets a mixture of
# both. So queries, keys and values are projected and split into $h$ heads of $d / h$ channels, each with its own
# attention weights:
#
# $$\operatorname{head}_i = \operatorname{Attention}(Q W_i^Q, K W_i^K, V W_i^V), \qquad
# \operatorname{MultiHead}(Q, K, V) = [\operatorname{head}_1; \dots; \operatorname{head}_h]\, W^O.$$
#
# The cost is that of one head with all channels. vitkit's layer has the same parameters as PyTorch's, so the two can be
# compared:

# %%
ours, theirs = MultiHeadAttention(32, num_heads=4), nn.MultiheadAttention(32, 4, batch_first=True)
ours.load_state_dict(theirs.state_dict())
x = torch.randn(2, 7, 32)
print("largest difference", float((ours(x, x, x) - theirs(x, x, x)[0]).abs().max()))

# %% [markdown]
# A small task shows the use of a second head: in a sequence of random symbols, predict at each position the symbol to
# its *left* and the one to its *right*, in this order. One head can spread its weight over both neighbors, but returns
# a single weighted mean, from which it is hard to tell which symbol was on the left. Two heads can attend to one
# neighbor each. (The sequence is circular: the left neighbor of the first symbol is the last.)
#
# The model is one attention layer on embeddings with the Transformer's position encoding, which notebook 2 explains.

# %%
SYMBOLS, LENGTH, WIDTH = 8, 12, 64


class Neighbors(nn.Module):
    """Predict each symbol's left and right neighbor by one layer of attention."""

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


def neighbors_of(symbols):
    """The left and the right neighbor of each symbol, in a ring."""
    return torch.stack((symbols.roll(1, 1), symbols.roll(-1, 1)), dim=-1)


maps = {}
for num_heads in (1, 2):
    torch.manual_seed(1)
    model = Neighbors(num_heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(600):
        symbols = torch.randint(SYMBOLS, (64, LENGTH))
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 2), neighbors_of(symbols).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    symbols = torch.randint(SYMBOLS, (500, LENGTH))
    with torch.no_grad(), AttentionRecorder(model) as recorded:
        right = (model(symbols).argmax(-1) == neighbors_of(symbols)).float().mean()
    maps[num_heads] = recorded["attention"][0].mean(0).numpy()  # (heads, length, length), mean of the rows
    print(f"{num_heads} head(s): {right:.3f} of the neighbors are right, chance is {1 / SYMBOLS:.3f}")

# %% [markdown]
# `AttentionRecorder` collected the weights while the model ran: inside its `with` block, it records the weights of
# every attention layer under the layer's name, without changes to the model. The figures show means over 500 sequences.

# %%
positions = [str(n) for n in range(LENGTH)]
draw_heads([maps[1]], positions, positions, out / "one_head.png", title="One head must mix both neighbors")
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
# - Notebook 2 trains a complete Transformer.
