"""Runs where the stock `openai` package is: streams one completion and prints each token id as it comes.

python -m tests.vllm.openai_client URL SESSION TAKE_OVER PROMPT COUNT
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI


def main(url: str, session: str, take_over: str, prompt: str, count: str) -> None:
    """Stream until it ends, or breaks."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="m",
        prompt=json.loads(prompt),
        max_tokens=int(count),
        temperature=0,
        stream=True,
        extra_headers={"X-Session-ID": session},
        extra_body={
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"kvlog": {"take_over": take_over == "yes"}},
        },
    )
    for chunk in stream:
        for choice in chunk.choices:
            for token in choice.model_extra.get("token_ids") or []:
                print(token, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
