"""Compare the Transformer with others of the same size: its decoding with transformers' MarianMT, its training step
with torch.nn.Transformer; weights and tokens are random."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitkit.losses.sequence import SequenceLoss
from vitkit.nn.position import sine_positions_1d
from vitkit.seq2seq.decoding import DecodingSettings, decode
from vitkit.seq2seq.transformer import Transformer
from vitkit.structures import BOS, EOS, PAD
from vitkit.tools.benchmark.models import import_transformers
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare


class TextCase(NamedTuple):
    """The size of the model and of its texts; the defaults are Transformer base on sentences of about 30 tokens."""

    num_layers: int = 6
    d_model: int = 512
    num_heads: int = 8
    d_ffn: int = 2048
    vocabulary_size: int = 32000
    dropout: float = 0.1
    batch_size: int = 32
    source_length: int = 32
    target_length: int = 64
    """The number of decoded tokens; in training, the target is as long as the source."""


BASE, BEAMS = TextCase(), (1, 4)


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure decoding or training."""
    return {"decoding": measure_decoding, "translation": measure_training}[part](options)


def measure_decoding(options: Options, case: TextCase = BASE) -> list[Measurement]:
    """Time decoding with caches, transformers first; each model decodes exactly `target_length` tokens."""
    rows = []
    for beams in BEAMS:
        builders = {
            "transformers MarianMT": partial(marian_decoding, case, beams, options),
            "vitkit Transformer": partial(our_decoding, case, beams, options),
        }
        method = "greedy" if beams == 1 else f"{beams} beams"
        what = f"decoding, {method}, batch {case.batch_size}, {case.target_length} tokens"
        rows += compare(what, builders, options, memory=False)
    return rows


def measure_training(options: Options, case: TextCase = BASE) -> list[Measurement]:
    """Time a training step, torch.nn.Transformer first: forward, label-smoothed loss, backward, Adam."""
    builders = {
        "torch.nn.Transformer": partial(pytorch_training, case, options),
        "vitkit Transformer": partial(our_training, case, options),
    }
    what = f"translation, training step, batch {case.batch_size}, {case.source_length} tokens"
    return compare(what, builders, options, memory=False)


def random_texts(case: TextCase, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return token ids (B, S) of texts with two thirds to all of the source length, and their padding mask."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch_size, case.source_length)
    tokens = torch.randint(EOS + 1, case.vocabulary_size, shape, generator=generator)
    lengths = torch.randint(2 * shape[1] // 3, shape[1] + 1, shape[:1], generator=generator)
    lengths[0] = shape[1]
    padding = torch.arange(shape[1]) >= lengths[:, None]
    return tokens.masked_fill(padding, PAD).to(device), padding.to(device)


def our_model(case: TextCase, *, final_norm: bool) -> Transformer:
    """Build vitkit's Transformer in the case's size."""
    torch.manual_seed(0)
    size = case.vocabulary_size
    return Transformer(
        source_size=size,
        target_size=size,
        num_layers=case.num_layers,
        d_model=case.d_model,
        num_heads=case.num_heads,
        d_ffn=case.d_ffn,
        dropout=case.dropout,
        final_norm=final_norm,
    )


def our_decoding(case: TextCase, beams: int, options: Options) -> Call:
    """Return a call that decodes the case's texts with vitkit."""
    model = our_model(case, final_norm=False).to(options.device).eval()
    source, padding = random_texts(case, options.device)
    length = case.target_length
    settings = DecodingSettings(
        method="greedy" if beams == 1 else "beam", beams=beams, max_length=length, min_length=length - 1
    )

    def run() -> list:
        with options.autocast():
            return decode(model, {"source": source, "source_padding": padding}, settings)

    return run


def marian_model(case: TextCase) -> nn.Module:
    """Build transformers' Marian model in the case's size."""
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    config = transformers.MarianConfig(
        vocab_size=case.vocabulary_size,
        d_model=case.d_model,
        encoder_layers=case.num_layers,
        decoder_layers=case.num_layers,
        encoder_attention_heads=case.num_heads,
        decoder_attention_heads=case.num_heads,
        encoder_ffn_dim=case.d_ffn,
        decoder_ffn_dim=case.d_ffn,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        decoder_start_token_id=BOS,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.MarianMTModel(config)


def marian_decoding(case: TextCase, beams: int, options: Options) -> Call:
    """Return a call that decodes the case's texts with transformers."""
    model = marian_model(case).to(options.device).eval()
    source, padding = random_texts(case, options.device)
    length = case.target_length

    def run() -> Tensor:
        with torch.inference_mode(), options.autocast():
            return model.generate(
                input_ids=source,
                attention_mask=(~padding).long(),
                num_beams=beams,
                do_sample=False,
                use_cache=True,
                max_new_tokens=length,
                min_new_tokens=length,
            )

    return run


class PyTorchTransformer(nn.Module):
    """torch.nn.Transformer with an embedding table that is shared by its input and its output."""

    def __init__(self, case: TextCase):
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary_size, case.d_model)
        nn.init.normal_(self.embedding.weight, std=case.d_model**-0.5)
        self.register_buffer("positions", sine_positions_1d(1024, case.d_model), persistent=False)
        self.dropout = nn.Dropout(case.dropout)
        self.transformer = nn.Transformer(
            case.d_model, case.num_heads, case.num_layers, case.num_layers, case.d_ffn, case.dropout, batch_first=True
        )

    def forward(self, source: Tensor, source_padding: Tensor, target_in: Tensor) -> Tensor:
        """Return the logits of the next tokens, (B, T, V)."""
        masked = torch.ones(target_in.shape[1], target_in.shape[1], dtype=torch.bool, device=source.device).triu(1)
        x = self.transformer(
            self._embed(source),
            self._embed(target_in),
            tgt_mask=masked,
            src_key_padding_mask=source_padding,
            memory_key_padding_mask=source_padding,
        )
        return F.linear(x, self.embedding.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        return self.dropout(x + self.positions[: tokens.shape[1]])


def pytorch_training(case: TextCase, options: Options) -> Call:
    """Return a call that does a training step of `torch.nn.Transformer`."""
    torch.manual_seed(0)
    model = PyTorchTransformer(case).to(options.device).train()
    tokens, padding = random_texts(case, options.device)

    def loss() -> Tensor:
        logits = model(tokens, padding, tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), ignore_index=PAD, label_smoothing=0.1)

    return training_step(options, model, loss)


def our_training(case: TextCase, options: Options) -> Call:
    """Return a call that does a training step of vitkit's Transformer."""
    model, criterion = our_model(case, final_norm=True).to(options.device).train(), SequenceLoss(label_smoothing=0.1)
    tokens, padding = random_texts(case, options.device)
    targets = [{"tokens": text[~hidden]} for text, hidden in zip(tokens, padding)]
    assert torch.equal(pad_sequence([t["tokens"] for t in targets], batch_first=True), tokens)
    return training_step(options, model, lambda: sum(criterion(model(tokens, padding, tokens), targets).values()))


def training_step(options: Options, model: nn.Module, loss: Callable[[], Tensor]) -> Call:
    """Return a call that does one step of Adam on the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)

    def run() -> None:
        with options.autocast():
            total = loss()
        total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run
