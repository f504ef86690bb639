import math
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from vitkit.apps.inference.translator import translate
from vitkit.errors import CheckpointError, DataError
from vitkit.model_zoo.converters.fairseq import fairseq_dictionary
from vitkit.nn.position import fairseq_positions_1d
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import DecodingSettings
from vitkit.structures import BOS, EOS, PAD, UNK
from vitkit.text.vocabulary import SPECIAL_TOKENS
from vitkit.weights import load_weights, read_checkpoint

D = 8


def tiny(**changes):
    spec = dict(type="Transformer", source_size=7, target_size=9, num_layers=1, d_model=D, num_heads=2, d_ffn=12)
    return MODELS.build({**spec, "positions": "fairseq", "shared_embeddings": False, "norm_first": True, **changes})


def fairseq_state(*, source_rows=7, target_rows=9, share_all=False):
    """A random state dict under fairseq's names, written out by hand."""
    torch.manual_seed(0)
    target = torch.randn(target_rows, D)
    state = {
        "encoder.version": torch.tensor([3.0]),
        "encoder.embed_tokens.weight": target if share_all else torch.randn(source_rows, D),
        "encoder.embed_positions._float_tensor": torch.zeros(1),
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_tokens.weight": target,
        "decoder.embed_positions._float_tensor": torch.zeros(1),
        "decoder.output_projection.weight": target,
    }
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        for attention in attentions:
            for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
                state[f"{side}.layers.0.{attention}.{projection}.weight"] = torch.randn(D, D)
                state[f"{side}.layers.0.{attention}.{projection}.bias"] = torch.randn(D)
        norms = [f"layers.0.{attention}_layer_norm" for attention in attentions]
        for norm in (*norms, "layers.0.final_layer_norm", "layer_norm"):
            state[f"{side}.{norm}.weight"], state[f"{side}.{norm}.bias"] = torch.randn(D), torch.randn(D)
        for name, shape in (("fc1", (12, D)), ("fc2", (D, 12))):
            state[f"{side}.layers.0.{name}.weight"] = torch.randn(shape)
            state[f"{side}.layers.0.{name}.bias"] = torch.randn(shape[0])
    return state


def test_positions_are_sines_then_cosines_counted_from_two():
    codes = fairseq_positions_1d(3, 4)
    expected = [[math.sin(p), math.sin(p / 10000), math.cos(p), math.cos(p / 10000)] for p in (2, 3, 4)]
    torch.testing.assert_close(codes, torch.tensor(expected))


def test_every_entry_of_fairseq_is_converted():
    model, theirs = tiny(), fairseq_state()
    report = load_weights(model, {"model": theirs, "cfg": None})
    assert report.converter == "fairseq" and not report.missing and not report.unexpected
    ours = model.state_dict()
    layer = "decoder.layers.0."
    parts = [theirs[f"{layer}encoder_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(ours["decoder.stack.layers.0.cross_attn.in_proj_weight"], torch.cat(parts))
    assert torch.equal(ours["decoder.stack.layers.0.norm2.bias"], theirs[f"{layer}encoder_attn_layer_norm.bias"])
    assert torch.equal(ours["decoder.stack.layers.0.norm3.bias"], theirs[f"{layer}final_layer_norm.bias"])
    assert torch.equal(ours["encoder.layers.0.norm2.bias"], theirs["encoder.layers.0.final_layer_norm.bias"])
    assert torch.equal(ours["encoder.norm.weight"], theirs["encoder.layer_norm.weight"])


def test_token_ids_are_reordered():
    model, theirs = tiny(), fairseq_state()
    load_weights(model, theirs)
    for table, name in ((model.source_embedding, "encoder"), (model.decoder.embedding, "decoder")):
        rows = theirs[f"{name}.embed_tokens.weight"]
        for ours, fairseqs in ((PAD, 1), (UNK, 3), (BOS, 2), (EOS, 2), (4, 4), (6, 6)):
            assert torch.equal(table.weight[ours], rows[fairseqs]), (name, ours)


def test_separate_output_projection_and_shared_table_are_converted():
    theirs = fairseq_state()
    theirs["decoder.output_projection.weight"] = torch.randn(9, D)
    model = tiny(tied_output=False)
    load_weights(model, theirs)
    assert torch.equal(model.decoder.output.weight[4:], theirs["decoder.output_projection.weight"][4:])
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): decoder\.output\.weight"):
        load_weights(tiny(), theirs)
    shared = tiny(source_size=9, shared_embeddings=True)
    load_weights(shared, fairseq_state(share_all=True))
    assert shared.source_embedding is None


def test_numpy_numbers_in_training_statistics_are_left_out(tmp_path):
    statistics = {"best": np.float64(0.5), "counts": np.array([1, 2]), "sum": 3}
    torch.save({"model": fairseq_state(), "extra_state": statistics}, tmp_path / "fairseq.pt")
    content = read_checkpoint(tmp_path / "fairseq.pt")
    assert content["extra_state"]["sum"] == 3 and not isinstance(content["extra_state"]["counts"], np.ndarray)
    assert load_weights(tiny(), tmp_path / "fairseq.pt").converter == "fairseq"
    torch.save({"weight": np.zeros(3)}, tmp_path / "arrays.pt")
    with pytest.raises(CheckpointError, match=r"arrays\.pt: contains no tensors"):
        load_weights(tiny(), tmp_path / "arrays.pt")


def test_dictionaries_are_read(tmp_path):
    path = tmp_path / "dict.en.txt"
    path.write_text("the 12\n# 3\nun@@ 2\nmadeupword0000 0\n", encoding="utf-8")
    assert fairseq_dictionary(path) == [*SPECIAL_TOKENS, "the", "#", "un@@", "madeupword0000"]
    path.write_text("the\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1 is 'the'; expected a token, a space and its count"):
        fairseq_dictionary(path)


def byte_pairs(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Split a word by the learned merges of subword-nmt, version 0.2 of its files."""
    parts = [*word[:-1], f"{word[-1]}</w>"]
    while len(parts) > 1:
        best = min(pairwise(parts), key=lambda pair: ranks.get(pair, math.inf))
        if best not in ranks:
            break
        merged, rest = [], parts
        while rest:
            size = 2 if tuple(rest[:2]) == best else 1
            merged.append("".join(rest[:size]))
            rest = rest[size:]
        parts = merged
    return [f"{part}@@" for part in parts[:-1]] + [parts[-1].removesuffix("</w>")]


@pytest.mark.parametrize(("name", "num_layers", "num_parameters"), [("001.35", 5, 2_520_576), ("001.38", 8, 3_909_120)])
def test_published_transformers_reproduce_their_published_translations(name, num_layers, num_parameters):
    """The folder is `detransliterator/assets` of the Python package of that name, version 0.0.2."""
    if "VITKIT_FAIRSEQ" not in os.environ:
        pytest.skip("VITKIT_FAIRSEQ does not name the assets of the package detransliterator")
    folder = Path(os.environ["VITKIT_FAIRSEQ"]) / f"latin2nqo_{name}"
    source, target = (fairseq_dictionary(folder / f"data/dict.{side}.txt") for side in ("roman", "nqo"))
    lines = (folder / "data/bpe.code").read_text(encoding="utf-8").splitlines()[1:]
    ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
    model = tiny(
        source_size=len(source), target_size=len(target), num_layers=num_layers, d_model=128, num_heads=8, d_ffn=512
    ).eval()
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    load_weights(model, folder / "checkpoints/checkpoint_best.pt")
    pieces = [piece for word in ("musa", "dunbuya") for piece in byte_pairs(word, ranks)]
    settings = DecodingSettings(method="beam", beams=5, length_penalty=1.0)
    ids = [source.index(piece) if piece in source else UNK for piece in pieces]
    ((_, hypotheses),) = translate(model, [ids], settings)
    text = " ".join(target[index] for index in hypotheses[0].tokens).replace("@@ ", "")
    assert text == "ߡߎߛߊ߫ ߘߎ߲ߓߎߦߊ"
