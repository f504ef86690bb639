from vitkit.apps.explanations.text_figures import file_stem


def test_sentences_with_the_same_beginning_have_their_own_files():
    beginning = "one two three four five six seven"
    first, second = file_stem(f"{beginning} eight"), file_stem(f"{beginning} nine")
    assert first[:31] == second[:31] == "one_two_three_four_five_six_se_"
    assert first != second == file_stem(f"{beginning} nine")  # drawn again, a sentence overwrites its own files


def test_short_sentences_are_their_files_names():
    assert (file_stem("Hello, world!"), file_stem("?")) == ("Hello_world", "text")
