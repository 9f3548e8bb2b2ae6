"""Stands in for a vLLM server where there is none: vLLM's HTTP around a synthetic engine, in two processes as there.

What it answers, logs, loads and digests is real; only that it is vLLM is not. It leaves what vLLM leaves: a segment in
/dev/shm, and an engine's process that is nobody's child once the server is killed (that one dies with it, as an engine
with a witness does).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from consumers.plain_http import NO_AUTHORITIES
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["install", "main"]

_ROOT = Path(__file__).parents[2]
_FOUND = {"python": [3, 11], "vllm": "0.32.0", "missing": [], "window": [[0, 32], [0, 33]]}


def install(folder: Path) -> Path:
    """Make an interpreter that has a vLLM; its path."""
    package = folder / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    (package / "api_server.py").write_text("from tests.e2e.vllm_stand_in import main\nmain()\n")
    program = folder / "python"
    path = f'"$PYTHONPATH:{_ROOT}:{folder / "site"}"'
    program.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{json.dumps(_FOUND)}'; exit; fi\n"
        f'export PYTHONPATH={path}\nexec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return program


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    given = parser.parse_known_args()[0]
    segment = _segment()
    engine = _Engine(given.kv_transfer_config["kv_connector_extra_config"]["link"])
    ThreadingHTTPServer(("127.0.0.1", given.port), _handler(engine)).serve_forever()
    segment.close()


def _segment() -> mmap.mmap:
    number, _ = tempfile.mkstemp(prefix="psm_stand-in-", dir="/dev/shm")
    os.ftruncate(number, 4096)
    return mmap.mmap(number, 4096)


class _Engine:
    """The other process."""

    def __init__(self, link: str) -> None:
        command = [sys.executable, "-m", "kvlog.engines", "synthetic", "--link", link, "--port", "0"]
        command += ["--claim-seconds", "5", "--tokens-per-second", "60"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
        )
        self.url = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready "):
                self.url = line.split()[1]

    def events(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Stream an answer."""
        params = body["kv_transfer_params"]
        asked = {
            "prompt": body["prompt"],
            "session": body["session_id"],
            "max_tokens": body["max_tokens"],
            "take_over": params["kvlog"]["take_over"],
            "kv_digests": params.get("kvlog_witness", {}).get("digests_at", []),
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", verify=NO_AUTHORITIES, json=asked, timeout=300
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


def _handler(engine: _Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._begin(200 if engine.url else 503)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._begin(200)
            if self.path == "/tokenize":
                text = "".join(message["content"] for message in body["messages"])
                self.wfile.write(json.dumps({"tokens": [ord(c) % 250 for c in text]}).encode())
                return
            for event in engine.events(body):
                self._pass_on(event, body["session_id"])

        def _pass_on(self, event: Mapping[str, Any], session: str) -> None:
            if "kvlog" in event:
                self._say({"choices": [], "usage": event["usage"]})
                _bear_witness(session, event["kvlog"])
            else:
                self._say(event)

        def _say(self, event: Mapping[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def _begin(self, status: int) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


def _bear_witness(session: str, kvlog: Mapping[str, Any]) -> None:
    """A moment later, as there."""
    time.sleep(0.05)
    told = {name: kvlog[name] for name in ("logged", "reason", "open_turn_ms", "attach_ms", "kv_digests")}
    known = kvlog["attached"] + kvlog["recomputed"]
    line = {"session": session, "known": known, "loaded": kvlog["attached"], **told}
    with Path(os.environ["KVLOG_VLLM_WITNESS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
