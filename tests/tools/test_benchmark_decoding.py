import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools import benchmark_decoding
from vitkit.tools.benchmark_decoding import Case

CASE = Case(
    num_layers=2, d_model=16, num_heads=2, d_ffn=32, vocabulary_size=50, batch_size=3, source_length=6, target_length=5
)


@pytest.mark.parametrize("beams", benchmark_decoding.BEAMS)
def test_both_decode_as_many_tokens(beams):
    pytest.importorskip("transformers")
    ours = benchmark_decoding.our_decoding(CASE, beams)()
    assert [len(hypotheses[0].tokens) for hypotheses in ours] in ([5] * 3, [4] * 3)
    assert benchmark_decoding.marian_decoding(CASE, beams)().shape == (3, 1 + 5)


def test_both_have_the_same_weights():
    pytest.importorskip("transformers")
    positions = sum(p.numel() for n, p in benchmark_decoding.marian_model(CASE).named_parameters() if "position" in n)

    def count(model):
        return sum(p.numel() for p in model.parameters())

    assert count(benchmark_decoding.our_model(CASE, final_norm=False)) == (
        count(benchmark_decoding.marian_model(CASE)) - positions
    )
    assert count(benchmark_decoding.our_model(CASE, final_norm=True)) == count(
        benchmark_decoding.PyTorchTransformer(CASE)
    )


def test_both_train_and_are_compared():
    rows = benchmark_decoding.measure_training(CASE, repeats=1)
    assert [row.name for row in rows] == ["torch.nn.Transformer", "vitkit Transformer"]
    assert rows[0].ratio == 1 and rows[1].seconds > 0


def test_texts_are_padded_at_the_end():
    tokens, padding = benchmark_decoding.random_texts(CASE)
    assert torch.equal(tokens == 0, padding) and not padding[0].any()
