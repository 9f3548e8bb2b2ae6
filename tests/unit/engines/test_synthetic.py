"""The synthetic engine: the same tokens from the same rows, other tokens from any other byte."""

from __future__ import annotations

import pytest

from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.errors import ConfigError

ROW_BYTES = 256


def model(**options) -> SyntheticModel:
    """An engine with small rows."""
    return SyntheticModel(SyntheticOptions(**{"row_bytes": ROW_BYTES, **options}))


def run(engine: SyntheticModel, cache, tokens: list[int], count: int) -> list[int]:
    """Generate greedily; `tokens` grows, returned is what is new."""
    start = len(tokens)
    while len(tokens) < start + count:
        logits = engine.forward(cache, tokens[cache.length :])
        tokens.append(int(logits.argmax()))
    return tokens[start:]


def rows(cache, length: int) -> bytearray:
    """The first rows of a cache."""
    out = bytearray(length * ROW_BYTES)
    cache.copy_rows(0, memoryview(out))
    return out


@pytest.mark.parametrize("cut", [1, 7, 30, 46])
def test_synthetic_resumed_from_copied_rows_goes_on_with_the_same_tokens(cut):
    """Rows are all that a resume needs, wherever it begins."""
    engine = model()
    whole, cache = engine.encode("hello"), engine.new_cache()
    run(engine, cache, whole, 42)
    resumed = engine.new_cache()
    resumed.load_rows(memoryview(rows(cache, cut)))
    tokens = whole[: max(cut + 1, 5)]
    run(engine, resumed, tokens, len(whole) - len(tokens))
    assert whole == tokens
    assert rows(cache, 46) == rows(resumed, 46)


def test_synthetic_any_wrong_byte_of_an_attached_row_changes_the_answer():
    """Every byte of every row matters: each of them is flipped once."""
    engine = model()
    tokens, cache = engine.encode("abc"), engine.new_cache()
    right = engine.forward(cache, tokens)
    good = rows(cache, 2)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        attached = engine.new_cache()
        attached.load_rows(memoryview(bad))
        assert (right != engine.forward(attached, tokens[2:])).any()


def test_synthetic_missing_and_stale_rows_change_the_answer():
    """A row too few, or of another history, is another answer."""
    engine = model()
    tokens, cache = engine.encode("abcd"), engine.new_cache()
    right = engine.forward(cache, tokens)
    short, other = engine.new_cache(), engine.new_cache()
    short.load_rows(memoryview(rows(cache, 2)))
    assert (right != engine.forward(short, tokens[3:])).any()
    engine.forward(other, engine.encode("xbcd"))
    stale = engine.new_cache()
    stale.load_rows(memoryview(rows(other, 3)))
    assert (right != engine.forward(stale, tokens[3:])).any()


def test_synthetic_row_that_rots_later_is_found_by_a_later_step():
    """Four earlier rows are read again at each step."""
    engine = model()
    tokens, twin_tokens = engine.encode("abcd"), engine.encode("abcd")
    cache, twin = engine.new_cache(), engine.new_cache()
    run(engine, cache, tokens, 3)
    run(engine, twin, twin_tokens, 3)
    cache.view_row(2)[ROW_BYTES - 1] ^= 1
    assert run(engine, cache, tokens, 40) != run(engine, twin, twin_tokens, 40)


def test_synthetic_prefill_in_pieces_equals_prefill_whole():
    """Nothing depends on when rows are computed."""
    engine, tokens = model(), list(range(50))
    whole, pieces = engine.new_cache(), engine.new_cache()
    at_once = engine.forward(whole, tokens)
    for token in tokens:
        one_by_one = engine.forward(pieces, [token])
    assert (at_once == one_by_one).all()


def test_synthetic_cut_forgets_and_goes_on_otherwise():
    """After a cut, rows and answers are those of the shorter history."""
    engine = model()
    cache, direct = engine.new_cache(), engine.new_cache()
    engine.forward(cache, [1, 2, 3, 4, 5])
    cache.cut(2)
    assert cache.length == 2
    assert (engine.forward(cache, [9]) == engine.forward(direct, [1, 2, 9])).all()


def test_synthetic_cache_of_many_chunks_is_copied_in_one():
    """Chunks are not seen from outside."""
    engine = model(row_bytes=64 << 10)
    cache, other = engine.new_cache(), engine.new_cache()
    engine.forward(cache, list(range(40)))
    out = bytearray(30 * (64 << 10))
    cache.copy_rows(5, memoryview(out))
    expected = b"".join(cache.view_row(position).tobytes() for position in range(5, 35))
    assert expected == out
    other.load_rows(memoryview(out))
    assert cache.view_row(34).tobytes() == other.view_row(29).tobytes()


def test_synthetic_identity_names_row_size_and_weights():
    """Engines that differ in either do not attach from each other."""
    assert model().identity == model().identity
    weights = model().identity.difference(model(weights=1).identity)
    size = model().identity.difference(model(row_bytes=512).identity)
    assert weights is not None
    assert size is not None
    assert (weights[0], size[0]) == ("weights", "model")
    assert model().identity.layout.row_bytes == ROW_BYTES


@pytest.mark.parametrize("row_bytes", [0, 32, 100, 4097])
def test_synthetic_row_size_that_is_no_multiple_of_64_is_refused(row_bytes):
    """The setting's error says what to choose."""
    with pytest.raises(ConfigError, match="multiple of 64"):
        model(row_bytes=row_bytes)


def test_synthetic_text_is_printable():
    """Answers can be read aloud; prompts come back as they were."""
    engine = model()
    tokens, cache = engine.encode("grüße"), engine.new_cache()
    assert engine.decode(tokens) == "grüße"
    answer = run(engine, cache, tokens, 20)
    assert engine.decode(answer).isprintable()
    assert min(answer) >= 256
    assert engine.encode_chat([("user", "hi")]) == engine.encode("user: hi\nassistant: ")
