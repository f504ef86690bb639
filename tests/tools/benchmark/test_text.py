import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import text
from vitkit.tools.benchmark.text import TextCase
from vitkit.tools.benchmark.timing import Options

CASE = TextCase(
    num_layers=2, d_model=16, num_heads=2, d_ffn=32, vocabulary_size=50, batch_size=3, source_length=6, target_length=5
)


@pytest.mark.parametrize("beams", text.BEAMS)
def test_both_models_decode_equally_many_tokens(beams):
    pytest.importorskip("transformers")
    ours = text.our_decoding(CASE, beams, Options())()
    assert [len(hypotheses[0].tokens) for hypotheses in ours] in ([5] * 3, [4] * 3)
    assert text.marian_decoding(CASE, beams, Options())().shape == (3, 1 + 5)


def test_both_models_have_equally_many_weights():
    pytest.importorskip("transformers")
    positions = sum(p.numel() for n, p in text.marian_model(CASE).named_parameters() if "position" in n)

    def count(model):
        return sum(p.numel() for p in model.parameters())

    assert count(text.our_model(CASE, final_norm=False)) == (count(text.marian_model(CASE)) - positions)
    assert count(text.our_model(CASE, final_norm=True)) == count(text.PyTorchTransformer(CASE))


def test_both_models_train_and_are_compared():
    rows = text.measure_training(Options(repeats=1), CASE)
    assert [row.name for row in rows] == ["torch.nn.Transformer", "vitkit Transformer"]
    assert rows[0].ratio == 1 and rows[1].seconds > 0


def test_texts_are_padded_at_the_end():
    tokens, padding = text.random_texts(CASE)
    assert torch.equal(tokens == 0, padding) and not padding[0].any()
