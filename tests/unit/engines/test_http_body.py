"""Bodies of the engine's HTTP server: what is taken, and the sentence for what is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvlog.engines.http_body import MAX_TOKENS_DEFAULT, Call, parse_call, sentence
from kvlog.engines.sampler import Sampler
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.errors import InvalidSessionId, LocalProtocolError
from kvlog.modes import FULL, IDS

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = SyntheticModel(SyntheticOptions(row_bytes=64, positions_max=1000))


def parse(*, chat: bool = False, headers: Sequence[bytes] = (), **body) -> Call:
    """A body's call."""
    return parse_call(json.dumps(body).encode(), MODEL, chat=chat, session_headers=headers)


def refusal(*, chat: bool = False, **body) -> str:
    """The sentence for a bad body."""
    with pytest.raises(LocalProtocolError) as caught:
        parse(chat=chat, **body)
    return sentence(caught.value)


def test_body_defaults_are_greedy_and_bounded():
    """A body with only a prompt is a request."""
    call = parse(prompt="hi")
    assert (tuple(b"hi"), (), MAX_TOKENS_DEFAULT, ()) == (
        call.request.prompt,
        call.request.resume,
        call.request.max_tokens,
        call.request.stops,
    )
    assert call.request.sampler.temperature == 0
    assert (None, None, False, False) == (call.session, call.mode, call.stream, call.return_token_ids)


def test_body_all_fields_are_taken():
    """Each field arrives where it belongs."""
    call = parse(
        prompt=[1, 2, 511],
        resume_token_ids=[300],
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        seed=11,
        stop=["a", "b"],
        stream=True,
        return_token_ids=True,
        session="chat-7",
        sync="ids",
        user="someone",
        model="anything",
        n=1,
        presence_penalty=0,
    )
    assert ((1, 2, 511), (300,), 7, ("a", "b")) == (
        call.request.prompt,
        call.request.resume,
        call.request.max_tokens,
        call.request.stops,
    )
    assert Sampler(temperature=0.5, top_p=0.9, top_k=20, seed=11) == call.request.sampler
    assert ("chat-7", IDS, True, True) == (call.session, call.mode, call.stream, call.return_token_ids)


def test_body_session_of_the_body_wins_over_the_header():
    """The header is for clients whose library hides the body."""
    assert parse(prompt="x", headers=[b"h"]).session == "h"
    assert parse(prompt="x", session="b", headers=[b"h"]).session == "b"


def test_body_null_is_as_good_as_absent():
    """OpenAI's client libraries send nulls."""
    call = parse(prompt="x", stop=None, max_tokens=None, seed=None, stream=None, n=None, temperature=None)
    assert MAX_TOKENS_DEFAULT == call.request.max_tokens


def test_body_unseeded_sampling_gets_a_seed_of_its_own():
    """Two unseeded requests are two draws."""
    assert (
        parse(prompt="x", temperature=1).request.sampler != parse(prompt="x", temperature=1).request.sampler
    )


def test_body_chat_messages_may_have_text_parts():
    """Both forms of content that OpenAI's clients send."""
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    one = parse(chat=True, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3)
    two = parse(chat=True, messages=[{"role": "user", "content": parts}])
    assert one.request.prompt == two.request.prompt == tuple(b"user: hi\nassistant: ")
    assert one.request.max_tokens == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt: it is neither a string nor a list of token ids."),
        ({"prompt": ""}, "prompt: it has no tokens."),
        ({"prompt": ["a", "b"]}, "prompt: it is not a list of token ids."),
        ({"prompt": [1, True]}, "prompt: it is not a list of token ids."),
        ({"prompt": [1, 512]}, "prompt: it has a token id outside 0 to 511."),
        ({"prompt": [-1]}, "prompt: it has a token id outside 0 to 511."),
        ({"prompt": "x" * 1000}, "prompt: it has 1000 tokens, this model takes 1000 with the answer."),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: it is not a whole number from 1 to 2147483648."),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens: it is not a whole number from 1 to 2147483648."),
        ({"prompt": "x", "stream": 1}, "stream: it is neither true nor false."),
        ({"prompt": "x", "temperature": "hot"}, "temperature: it is not a number."),
        ({"prompt": "x", "stop": ""}, "stop: a stop string does not have 1 to 256 characters."),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop: it is not a string or a list of at most 16 strings."),
        ({"prompt": "x", "resume_token_ids": "abc"}, "resume_token_ids: it is not a list of token ids."),
        ({"prompt": "x", "n": 2}, "n: this engine does not support it, leave it out."),
        (
            {"prompt": "x", "frequency_penalty": 0.5},
            "frequency_penalty: this engine does not support it, leave it out.",
        ),
        ({"prompt": "\ud800"}, "prompt: it has a lone surrogate, which is no character."),
        ({"prompt": ["\udfff"]}, "prompt: it has a lone surrogate, which is no character."),
        ({"prompt": "x", "stop": ["a", "\ud800"]}, "stop: it has a lone surrogate, which is no character."),
        ({"prompt": "x", "temperature": 10**400}, "temperature: it is too large."),
        (
            {"prompt": "x", "session": 5},
            "session: it is not a string. Name the session with 1 to 256 bytes of printable UTF-8.",
        ),
    ],
)
def test_body_wrong_field_is_named_in_a_sentence(body, said):
    """Who sends a bad request reads which field and what is wrong with it."""
    assert said == refusal(**body)


@pytest.mark.parametrize("session", ["", "a\x00b", "ü" * 200, "x" * 10_000])
def test_body_bad_session_id_is_refused(session):
    """Odd ids end here, before they become keys."""
    assert "session: it" in refusal(prompt="x", session=session)
    with pytest.raises(InvalidSessionId):
        parse(prompt="x", headers=[session.encode()])


def test_body_session_is_the_same_in_a_header():
    """A name in UTF-8 bytes is that name, not what Latin-1 makes of them; what is not UTF-8 is no name."""
    assert "é/日本" == parse(prompt="x", headers=["é/日本".encode()]).session
    for headers, problem in (
        ([b"\xff"], "the header X-Session-ID is not UTF-8"),
        ([b"a", b"b"], "there are 2 headers X-Session-ID"),
    ):
        with pytest.raises(InvalidSessionId) as caught:
            parse(prompt="x", headers=headers)
        assert problem == caught.value.fields["problem"]


@pytest.mark.parametrize(
    "message", [{"role": "\ud800", "content": "x"}, {"role": "user", "content": "\ud800"}]
)
def test_body_message_with_half_a_character_is_refused(message):
    """No tokenizer takes it."""
    assert "messages: it has a lone surrogate, which is no character." == refusal(
        chat=True, messages=[message]
    )


def test_body_sampler_values_out_of_range_say_what_to_send():
    """The sampler's own bounds reach the client."""
    assert "top_p: 0.0 is not possible, send" in refusal(prompt="x", top_p=0)
    assert "sync: 'often' is no sync mode" in refusal(prompt="x", sync="often")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000])
def test_body_that_is_no_object_is_refused(data):
    """Junk is one sentence too."""
    with pytest.raises(LocalProtocolError) as caught:
        parse_call(data, MODEL, chat=False, session_headers=())
    assert "body: it is not" in sentence(caught.value)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [5],
    ],
)
def test_body_messages_that_are_no_text_are_refused(messages):
    """A picture that is silently dropped would be another question."""
    assert refusal(chat=True, messages=messages).startswith("messages: ")


def test_body_kv_digests_are_a_short_list_of_lengths():
    """`kv_digests` may be empty; what is no number of positions, or too much of it, is refused by name."""
    assert None is parse(prompt="hi").kv_digests
    assert () == parse(prompt="hi", kv_digests=[]).kv_digests
    assert (5, 70) == parse(prompt="hi", kv_digests=[5, 70]).kv_digests
    for wrong in (7, [0], [-1], [True], ["5"], list(range(1, 10))):
        assert refusal(prompt="hi", kv_digests=wrong).startswith("kv_digests: ")


def test_body_takes_over_when_it_resumes_or_says_so():
    """Only who continues an answer may take its session from a node that is busy with it."""
    assert not parse(prompt="hi").take_over
    assert not parse(prompt="hi", resume_token_ids=[], take_over=False).take_over
    assert parse(prompt="hi", resume_token_ids=[5]).take_over
    assert parse(prompt="hi", take_over=True).take_over
    assert "take_over: it is neither true nor false." == refusal(prompt="hi", take_over=1)


def test_body_acked_seconds_are_a_time():
    """A deadline of never, or of a week, is refused by name."""
    assert (False, None) == (parse(prompt="hi").acked, parse(prompt="hi").acked_seconds)
    assert 0.5 == parse(prompt="hi", acked=True, acked_seconds=0.5).acked_seconds
    for wrong in (0, -1, 601, "1", True):
        assert refusal(prompt="hi", acked_seconds=wrong).startswith("acked_seconds: ")


def test_body_acked_asks_for_rows_in_the_log():
    """Token ids alone cannot be waited for, and the daemon's own setting may be just that."""
    assert parse(prompt="hi").mode is None
    assert FULL == parse(prompt="hi", acked=True).mode
    assert "every:4,9ms" == str(parse(prompt="hi", acked=True, sync="every:4,9ms").mode)
    assert IDS == parse(prompt="hi", sync="ids").mode
    assert refusal(prompt="hi", acked=True, sync="ids").startswith("sync: ids puts no rows into the log")
