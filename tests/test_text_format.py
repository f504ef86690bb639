"""Messages count one thing in the singular."""

import pytest

from vitkit.text_format import pluralize


@pytest.mark.parametrize(
    ("one", "many", "noun"),
    [
        ("1 image", "2 images", "images"),
        ("1 class", "2 classes", "classes"),
        ("1 bad box", "2 bad boxes", "bad boxes"),
        ("1 query", "2 queries", "queries"),
        ("1 sentence", "0 sentences", "sentences"),
    ],
)
def test_a_single_thing_is_in_the_singular(one, many, noun):
    assert pluralize(1, noun) == one and pluralize(int(many[0]), noun) == many


def test_a_verb_agrees_with_the_number_and_the_noun_with_the_number_of_all():
    assert [pluralize(n, "boxes", "have") for n in (1, 2)] == ["1 box has", "2 boxes have"]
    assert [pluralize(n, "boxes", "are", of=3) for n in (1, 2)] == ["1 of 3 boxes is", "2 of 3 boxes are"]
    assert (
        pluralize(1, "images", "look", of=1) == "1 of 1 image looks" and pluralize(0, "images", of=1) == "0 of 1 image"
    )
