"""Settings of a translation."""

import pytest

from vitkit.apps.inference.translator import adapt_to_hypotheses
from vitkit.errors import ConfigError
from vitkit.seq2seq.decoding import DecodingSettings


def test_settings_are_adapted_to_several_hypotheses():
    greedy, sample = DecodingSettings(), DecodingSettings(method="sample", top_k=3)
    beam = DecodingSettings(method="beam", beams=3, n_best=3)
    assert adapt_to_hypotheses(greedy) == greedy
    assert adapt_to_hypotheses(greedy, 6) == DecodingSettings(method="beam", beams=6, n_best=6)
    assert adapt_to_hypotheses(beam, beams=1) == DecodingSettings(beams=1)
    assert adapt_to_hypotheses(beam, 2) == DecodingSettings(method="beam", beams=3, n_best=2)
    assert adapt_to_hypotheses(sample, 2) == DecodingSettings(method="sample", top_k=3, n_best=2)
    with pytest.raises(ConfigError, match=r"decoding.n_best: got 5; expected 1 to 2"):
        adapt_to_hypotheses(beam, 5, beams=2)
