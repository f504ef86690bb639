"""Folders of the transformers library's Marian: their SentencePiece files, and translations equal to the library's."""

import io
import json

import pytest
import sentencepiece
import torch

from vitkit import CheckpointError, load
from vitkit.structures import BOS, EOS
from vitkit.weights.transformers_folder import read_tokens_in

transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")

ENGLISH = ["a dog runs over the field", "two cats sleep, and a dog barks.", "the children play with a red ball"] * 4
GERMAN = ["ein Hund läuft über das Feld", "zwei Katzen schlafen, ein Hund bellt.", "Kinder spielen mit dem Ball"] * 4
TEXTS = ["a dog sleeps.", "Two  red cats — ﬁeld", ">>de<< the ball", "", "x", ">>xx<< cats"]


def sentence_pieces(texts):
    """Return a SentencePiece model like Marian's, with the library's normalization and ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=70, hard_vocab_limit=False, minloglevel=2
    )
    return model.getvalue()


def numbers(*models, pad_last):
    pieces = []
    for model in models:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces += [processor.id_to_piece(i) for i in range(3, len(processor))]
    tokens = dict.fromkeys(["</s>", "<unk>", *([] if pad_last else ["<pad>"]), *pieces, ">>de<<", "<pad>"])
    return {token: number for number, token in enumerate(tokens)}


@pytest.fixture(params=["one vocabulary", "two vocabularies"])
def folder(request, tmp_path):
    is_shared = request.param == "one vocabulary"
    models = {"source": sentence_pieces(ENGLISH), "target": sentence_pieces(GERMAN)}
    for side, model in models.items():
        (tmp_path / f"{side}.spm").write_bytes(model)
    source = numbers(*models.values(), pad_last=True) if is_shared else numbers(models["source"], pad_last=False)
    target = source if is_shared else numbers(models["target"], pad_last=False)
    (tmp_path / "vocab.json").write_text(json.dumps(source))
    files = {"vocab": str(tmp_path / "vocab.json")}
    if not is_shared:
        (tmp_path / "target_vocab.json").write_text(json.dumps(target))
        files |= {"target_vocab_file": str(tmp_path / "target_vocab.json"), "separate_vocabs": True}
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=len(source), decoder_vocab_size=len(target), share_encoder_decoder_embeddings=is_shared,
        pad_token_id=target["<pad>"], decoder_start_token_id=target["<pad>"], eos_token_id=0, forced_eos_token_id=0,
        d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, scale_embedding=True, max_position_embeddings=32,
        activation_function="swish",
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.5)
    model.final_logits_bias.normal_()
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=target["<pad>"], eos_token_id=0, decoder_start_token_id=target["<pad>"], num_beams=3,
        bad_words_ids=[[target["<pad>"]]],
    )  # fmt: skip
    tokenizer = transformers.MarianTokenizer(
        str(tmp_path / "source.spm"), str(tmp_path / "target.spm"), source_lang="en", target_lang="de", **files
    )
    model.save_pretrained(tmp_path)
    return tmp_path, model, tokenizer


def test_texts_are_tokenized_and_translated_as_in_the_library(folder):
    path, theirs, tokenizer = folder
    translator = load(path)
    assert (translator.model.decoding.method, translator.model.decoding.beams) == ("beam", 3)
    of_source, of_target = read_tokens_in(path).values()
    for text in TEXTS:
        expected = tokenizer(text).input_ids
        assert [of_source.numbers[i] for i in translator.vocabularies["source"].encode(text)] == expected[:-1]
    for text in GERMAN[:3]:
        expected = tokenizer(text_target=text).input_ids
        assert [of_target.numbers[i] for i in of_target.vocabulary.encode(text)] == expected[:-1]
    for text in ENGLISH[:3]:
        source = tokenizer(text, return_tensors="pt")
        ours_in = torch.tensor([[*translator.vocabularies["source"].encode(text), EOS]])
        target_in = torch.tensor([[BOS, 7, 5, 9, 20]])
        theirs_in = torch.tensor([[of_target.numbers[i] for i in target_in[0]]])
        with torch.no_grad():
            expected = theirs(**source, decoder_input_ids=theirs_in).logits[..., of_target.numbers]
            logits = translator.model(ours_in, None, target_in)["logits"]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        ids = theirs.generate(**source, num_beams=1, max_length=20)[0]
        expected = tokenizer.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
        ours = translator(text, beams=1).text
        assert expected and ours.startswith(expected)  # the library's end after 20 tokens


def test_saved_vocabularies_are_read_back_unchanged(folder):
    from vitkit.text.vocabulary import Vocabulary

    for _, (vocabulary, _) in read_tokens_in(folder[0]).items():
        again = Vocabulary.from_json(vocabulary.to_json())
        assert again == vocabulary and again.encode(TEXTS[2]) == vocabulary.encode(TEXTS[2])


def test_inconsistent_files_are_named(folder):
    path, _, _ = folder
    whole = (path / "vocab.json").read_text()
    for damaged in ('{"</s>": 0, "<unk>": 1}', '{"</s>": 0, "<unk>": 1, "a": [2]}'):
        (path / "vocab.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"vocab\.json: has 2 tokens, and the model \d+\. Get the files"):
            load(path)
    (path / "vocab.json").write_text(whole)
    (path / "source.spm").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"source\.spm: no SentencePiece model"):
        load(path)
    (path / "source.spm").unlink()
    with pytest.raises(CheckpointError, match=r"has no vocabularies\. .* with source\.spm, target\.spm, vocab\.json"):
        load(path)
