"""What the demo asks: a text to read, a question about it, and a nonce before both, so that no row can be prepared.

The nonce stands first: every row after it depends on it, in every layer.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

__all__ = ["PROMPT_DEFAULT", "Prompt"]

PROMPT_DEFAULT = "Describe the night of the great storm, hour by hour, as Margaret Dunn might have told it."

_TEXT = """\
The lighthouse on Skerry Rock was lit for the first time in October 1811. It stands eleven miles from the
nearest harbour, on a reef that is under water for most of the day, and so everything that its keepers
needed had to be brought by boat: oil, coal, bread, salted meat, fresh water, letters from home. In a
good summer the boat came once a fortnight. In winter it might not come for two months.

There were always three keepers on the rock, and a fourth one ashore. The day was cut into watches of
four hours. The keeper on watch trimmed the wicks, wound the clockwork that turned the lens, polished the
glass, and wrote down the wind, the height of the sea and the hour at which each lamp had been filled.
The rule of the service was short: the light must be seen from sunset to sunrise, whatever happens to the
man who tends it. No keeper was allowed to leave the lamp room before the next one had climbed the
stairs, read the last page of the book aloud and signed it. If a keeper fell ill, the next one took his
watch at once. If two fell ill, the third rang the fog bell by hand, lit the small lamp in the window and
slept on the floor beside the lens, so that he would wake when the clockwork stopped.

The book was the most important thing on the rock after the lamp itself. Everything that had been done to
the light stood in it, in order, and nothing was ever crossed out. A new keeper who had read the book
from the first page to the last knew as much of the light as the man before him, and could go on from
there without asking anybody. Twice a year the boat took a copy ashore, in case the sea should ever take
the first one.

On the night of the great storm, the ninth of January 1839, the sea broke the lower windows and put out
the kitchen fire. Shortly after two in the morning a wave threw the keeper on watch, a man named Alan
Reid, down the stairs, and he broke his leg. The clockwork ran on for eleven minutes by itself. Then the
second keeper, Margaret Dunn, who had come to the rock only in November, climbed to the lamp room with
water up to her knees. She read the last lines of the book by the light of the lamp, saw when it had been
filled and when it had been wound, took the crank in both hands, and turned the lens herself until the
morning. Four ships passed the reef that night. None of them noticed that the keeper had changed.
"""

_NONCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation's messages; made only after all nodes are ready.

    Args:
        nonce: random.
        question: what is shown of it.
        messages: of OpenAI's chat API.
    """

    nonce: str
    question: str
    messages: tuple[dict[str, str], ...]

    @classmethod
    def make(cls, question: str | None) -> Prompt:
        """Ask about the text, or, with a question of the user's own, without it."""
        nonce = secrets.token_hex(_NONCE_BYTES)
        system = f"Conversation {nonce}. You are a helpful assistant who explains things well."
        asked = question or PROMPT_DEFAULT
        user = asked if question else f"Read this text:\n\n{_paragraphs(_TEXT)}\n\n{asked}"
        messages = ({"role": "system", "content": system}, {"role": "user", "content": user})
        return cls(nonce, asked, messages)


def _paragraphs(text: str) -> str:
    """Undo the line breaks of this file."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
