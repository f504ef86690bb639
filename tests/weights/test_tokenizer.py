"""The tokenizer of text-prompted detectors: by name, from a folder or a file, or an error that says what to get."""

import re

import pytest
from helpers.grounding_models import BERT_TOKENS, bert_tokenizer

from vitkit.errors import CheckpointError
from vitkit.text.prompts import encode_phrases
from vitkit.weights import tokenizer_files
from vitkit.weights.tokenizer_files import find_tokenizer

pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")


@pytest.fixture
def vocabulary_file(tmp_path):
    """Write a `vocab.txt` with a token a line, as BERT's is."""
    names = {number: token for token, number in BERT_TOKENS.items()}
    lines = [names.get(number, f"[unused{number}]") for number in range(max(names) + 1)]
    path = tmp_path / "bert" / "vocab.txt"
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tokens_have_the_numbers_of_the_file(vocabulary_file):
    vocabulary = find_tokenizer(vocabulary_file)
    prompt = encode_phrases(vocabulary, ["A Hotdogs", "cat"])
    words = [BERT_TOKENS[token] for token in ("a", "hot", "##dog", "##s", ".", "cat", ".")]
    assert prompt.tokens == [101, *words, 102]
    assert prompt.phrase_ids == [-1, 0, 0, 0, 0, 0, 1, 1, -1]


def test_a_folder_or_either_file_may_be_given(vocabulary_file):
    folder = vocabulary_file.parent
    from_text = find_tokenizer(folder)
    (folder / "tokenizer.json").write_text(bert_tokenizer())
    from_json = find_tokenizer(str(folder))
    for vocabulary in (from_text, from_json, find_tokenizer(folder / "tokenizer.json")):
        assert encode_phrases(vocabulary, ["red dog"]).tokens == encode_phrases(from_text, ["red dog"]).tokens


def test_berts_file_is_downloaded_and_checked(vocabulary_file, monkeypatch):
    asked = {}

    def fetch_file(url, **options):
        asked.update(options, url=url)
        return vocabulary_file

    monkeypatch.setattr(tokenizer_files, "fetch_file", fetch_file)
    assert find_tokenizer("bert-base-uncased").numbers[2] == 101
    assert asked["url"] == "https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt"
    assert asked["checksum"] == "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
    assert asked["name"] == "bert-base-uncased-vocab.txt"


def test_without_a_network_the_error_names_the_file(monkeypatch):
    def fetch_file(url, **options):
        raise CheckpointError(f"{url}: cannot be reached.")

    monkeypatch.setattr(tokenizer_files, "fetch_file", fetch_file)
    message = "set model.tokenizer to a folder with it (vocab.txt, SHA-256 07eced37…, or tokenizer.json)"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        find_tokenizer("bert-base-uncased")


def test_missing_and_damaged_files_are_named(tmp_path, vocabulary_file):
    with pytest.raises(
        CheckpointError, match=r"there is no .*tokenizer\.json or .*vocab\.txt\. Expected bert-base-uncased"
    ):
        find_tokenizer(tmp_path)
    vocabulary_file.write_text("cat\ndog\n")
    with pytest.raises(CheckpointError, match=r"vocab\.txt: is not a file of BERT's tokens \(lacks \[PAD\], \[UNK\]"):
        find_tokenizer(vocabulary_file)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a file of BERT's tokens"):
        find_tokenizer(tmp_path)


def test_the_library_is_asked_for(monkeypatch):
    monkeypatch.setattr(tokenizer_files, "has_tokenizers", lambda: False)
    with pytest.raises(CheckpointError, match="tokenizer bert-base-uncased: needs the package tokenizers: pip install"):
        find_tokenizer("bert-base-uncased")
