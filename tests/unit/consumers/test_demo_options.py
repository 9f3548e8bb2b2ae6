"""The demo's command line: what it takes, and the sentence for what it does not."""

from __future__ import annotations

import pytest

from consumers.__main__ import main
from consumers.demo_acts import is_time_to_cut
from consumers.demo_client import Answer, Piece
from consumers.demo_error import DemoError
from consumers.demo_model import _row_bytes
from consumers.demo_options import TOKENS_DEFAULT, parse_options
from consumers.demo_place import log_settings_of, passes_setting
from consumers.demo_prompt import PROMPT_DEFAULT, Prompt
from consumers.exits import ExitCode
from kvlog.errors import ConfigError, LogUnavailable
from kvlog.log.local import LocalLog, LocalLogOptions


def test_options_without_arguments_are_the_trained_model_on_a_log_of_its_own():
    """Nothing needs to be given."""
    options = parse_options([])
    assert ("transformers", "small", "float32", None) == (
        options.engine,
        options.model,
        options.dtype,
        options.log,
    )
    assert (TOKENS_DEFAULT, None, False) == (options.tokens, options.kill_at, options.as_json)
    assert options.is_exact


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "7"], "--tokens 7 is not 16 to 4096."),
        (["--tokens", "5000"], "--tokens 5000 is not"),
        (["--kill-at", "0"], "--kill-at 0: the answer has 80 tokens (--tokens)"),
        (["--kill-at", "75"], "--kill-at 75: the answer has 80 tokens (--tokens)"),
        (["--kill-at", "20", "--tokens", "20"], "Choose 1 to 12, or raise --tokens."),
        (["--prompt", " "], "--prompt is empty."),
        (["--engine", "synthetic", "--model", "small"], "The synthetic engine has no model"),
        (["--engine", "synthetic", "--dtype", "float32"], "The synthetic engine has no model and no dtype."),
        (["--vllm-python", "python"], "--vllm-python is of no use to the transformers engine."),
        (
            ["--vllm-python", "p", "--engine", "synthetic"],
            "is of no use to the synthetic engine. Say --engine vllm",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_with_a_sentence(arguments, said, capsys):
    """The sentence names the argument and what would do; the exit code says that the arguments were wrong."""
    with pytest.raises(DemoError) as caught:
        parse_options(arguments)
    assert said in str(caught.value)
    assert ExitCode.USAGE == main(["demo", *arguments])
    assert said.split()[0] in capsys.readouterr().err


def test_bfloat16_is_reported_and_not_exact():
    """Rows that are computed again may differ by rounding in bfloat16; the synthetic engine computes exactly."""
    assert not parse_options(["--dtype", "bfloat16"]).is_exact
    assert [True, False] == [
        parse_options(["--engine", "vllm", "--dtype", dtype]).is_exact for dtype in ("float32", "bfloat16")
    ]
    assert parse_options(["--engine", "synthetic"]).is_exact


def said(text: str, tokens: int) -> Answer:
    """An answer as far as it has come."""
    answer = Answer(0.0)
    answer.take(Piece(tuple(range(tokens)), text, 1.0))
    return answer


def test_answer_is_cut_in_the_middle_of_a_sentence():
    """From two fifths of the answer on, where a sentence has begun; at the latest where something is left to say."""
    options = parse_options(["--tokens", "40"])
    assert not is_time_to_cut(options, said("It was a dark", 15))
    assert not is_time_to_cut(options, said("It was dark. And", 16))
    assert is_time_to_cut(options, said("It was dark. And then it", 16))
    assert is_time_to_cut(options, said("No. No. No.", 28))
    assert is_time_to_cut(parse_options(["--tokens", "16"]), said("No.", 8))
    assert [False, True] == [
        is_time_to_cut(parse_options(["--kill-at", "5"]), said("No.", n)) for n in (4, 5)
    ]


async def test_log_of_nothing_given_is_in_the_demos_folder(tmp_path):
    """The log goes with the folder."""
    settings = await log_settings_of(None, tmp_path)
    assert (tmp_path / "log").as_uri() == settings.url


async def test_log_that_is_there_keeps_its_partitions_and_is_not_trimmed(tmp_path):
    """P is what the log has, and retention is longer than anybody waits."""
    log = LocalLog(tmp_path / "mine", LocalLogOptions(partitions=3))
    await log.open()
    await log.close()
    settings = await log_settings_of(str(tmp_path / "mine"), tmp_path)
    assert 3 == settings.partitions
    assert settings.retention_seconds > 10 * 365 * 86_400


async def test_log_on_a_cluster_has_topics_of_its_own(monkeypatch, tmp_path):
    """A demo's sessions never get into a fleet's topics, whatever the environment says; how to get in does count."""
    monkeypatch.setenv("KVLOG_LOG__TOPIC_PREFIX", "kvlog")
    monkeypatch.setenv("KVLOG_LOG__KAFKA__USERNAME", "someone")
    settings = await log_settings_of("kafka://127.0.0.1:1", tmp_path)
    assert ("kvlog-demo", "someone") == (settings.topic_prefix, settings.kafka.username)
    assert 3600 == settings.retention_seconds
    assert [False, True] == [passes_setting(f"KVLOG_{name}") for name in ("NODE__ID", "LOG__KAFKA__PASSWORD")]


async def test_log_that_is_no_place_is_refused(tmp_path):
    """The sentence names the argument."""
    with pytest.raises(DemoError, match="--log: 'ftp://x' names no log"):
        await log_settings_of("ftp://x", tmp_path)


def test_prompt_begins_with_its_nonce():
    """Every row depends on a nonce that was made now."""
    one, other = Prompt.make(None), Prompt.make(None)
    assert one.nonce != other.nonce
    assert one.messages[0]["content"].startswith(f"Conversation {one.nonce}")
    assert one.messages[1]["content"].endswith(PROMPT_DEFAULT)
    assert "Why?" == Prompt.make("Why?").messages[1]["content"]


def test_row_bytes_are_those_of_the_models_configuration(tmp_path):
    """Layers × K and V × heads × head size × bytes; a guess if the file says nothing of the kind."""
    config = (
        '{"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}'
    )
    (tmp_path / "config.json").write_text(config)
    assert 30 * 2 * 3 * 64 * 4 == _row_bytes(tmp_path, "float32")
    assert 30 * 2 * 3 * 64 * 2 == _row_bytes(tmp_path, "bfloat16")
    assert 128 << 10 == _row_bytes(tmp_path / "nothing", "float32")


def test_error_of_kvlog_becomes_two_sentences():
    """Problem and fix are kept; advice for a running fleet is not given to who starts a demo."""
    wrong = ConfigError(setting="x", problem="it is full", fix="make room")
    assert "The log: it is full. Make room." == str(DemoError.of(wrong, "The log:"))
    gone = DemoError.of(LogUnavailable(where="x", problem="no answer"), "The log:")
    assert "Check that it is running, and that this is its address." == gone.fix
    assert ExitCode.UNREACHABLE == gone.code
