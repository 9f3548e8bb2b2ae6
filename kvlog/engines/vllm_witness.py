"""The connector with a witness: what each turn's blocks held, and what it cost, is told to a file.

For `kvlog demo` and tests. It is the production connector, asked when a turn ends and before anything else is written
to its blocks: what is told is what the engine computed with, not what the log says. Digests only, neither tokens nor
rows. An engine with a witness dies with the server that started it, also where that is killed: nothing must be left of
a demo.

    KVLOG_VLLM_WITNESS                                      the file; one JSON line a turn; of other ranks: FILE.RANK
    kv_transfer_params: {"kvlog_witness": {"digests_at": [n, …]}}    of a request: digest rows [0, n) too
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvlog.engines.kv_digests import digests_at
from kvlog.engines.vllm import KvlogConnector

if TYPE_CHECKING:
    from kvlog.engines.turn_evidence import TurnEvidence

__all__ = ["WitnessConnector"]

_FILE: Final = "KVLOG_VLLM_WITNESS"
_PARAMS: Final = "kvlog_witness"
_PR_SET_PDEATHSIG: Final = 1
"""Source: prctl(2), <linux/prctl.h>."""


class WitnessConnector(KvlogConnector):
    """Appends one JSON line for each turn that ends."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401 - theirs
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        super().__init__(vllm_config, role, kv_cache_config)
        rank = vllm_config.parallel_config.rank
        self._file = os.environ[_FILE] + (f".{rank}" if rank else "")
        self._asked: dict[str, tuple[int, ...]] = {}
        self._wanted: dict[str, tuple[int, ...]] = {}

    # In the scheduler

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - theirs
        """Note what the request asks the witness for."""
        asked = (request.kv_transfer_params or {}).get(_PARAMS)
        if asked and request.session_id:
            self._asked[request.session_id] = tuple(asked["digests_at"])
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:  # noqa: ANN401 - theirs
        """Let it travel with the step's plan."""
        plan = super().build_connector_meta(scheduler_output)
        plan.witness, self._asked = self._asked, {}
        return plan

    # In the worker

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:  # noqa: ANN401 - theirs
        """Bear witness before the step."""
        self.bear_witness(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def bear_witness(self, kv_connector_metadata: Any) -> None:  # noqa: ANN401 - theirs
        """Look at the turns that end while their blocks are still theirs."""
        self._wanted |= kv_connector_metadata.witness
        for close in kv_connector_metadata.plan.closes:
            evidence = self._working.worker.evidence(close.key)
            if evidence is not None:
                said = self.testimony(evidence) | {"held": bool(close.held)}
                line = json.dumps(said) + "\n"
                # Each line at once: it is read while it is written.
                with Path(self._file).open("ab", buffering=0) as file:
                    file.write(line.encode())

    def testimony(self, turn: TurnEvidence) -> dict[str, Any]:
        """What is told of a turn."""
        handle, length = turn.handle, turn.rows.length
        wanted = {length, turn.loaded, *self._wanted.pop(turn.session, ())}
        return {
            "session": turn.session,
            "length": length,
            "known": turn.known,
            "loaded": turn.loaded,
            "logged": handle is not None and handle.logged,
            "reason": None if handle is None or handle.reason is None else str(handle.reason),
            "open_turn_ms": round(turn.times.open_ms, 3),
            "attach_ms": round(turn.times.attach_ms, 3),
            "kv_digests": digests_at(turn.rows, turn.layout, wanted),
        }
