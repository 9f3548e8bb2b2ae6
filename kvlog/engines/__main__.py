"""An engine process: `python -m kvlog.engines synthetic|transformers --link PATH --port N`.

It prints one line on standard output, `ready http://HOST:PORT`, when requests are taken. It starts without a daemon and
connects when there is one. SIGTERM and SIGINT end it; running answers get a few seconds.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from kvlog.engines.acked_gate import AckedOptions, Late
from kvlog.engines.http_body import ACKED_SECONDS_MAX
from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.server import EngineServer
from kvlog.engines.step_loop import StepLoop, StepLoopOptions
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.errors import KvlogError
from kvlog.layout import DType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.engines.base import StepModel

__all__ = ["main"]

_GRACE_SECONDS = 3
"""For running answers, when the process is asked to end."""

_LINK_WAIT_SECONDS = 2.0
"""An engine that starts together with its daemon is usually linked when it says ready; without one it starts anyway."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop. Returns: the process's exit code."""
    args = _parser().parse_args(arguments)
    try:
        model = _model(args)
    except KvlogError as error:
        print(error, file=sys.stderr)
        return 2
    listener = socket.create_server((args.host, args.port))
    options = ReplicatorOptions(socket=Path(args.link or "/nonexistent"), engine=f"kvlog {args.engine}")
    replicator = Replicator(options, model.identity)
    loop_options = StepLoopOptions(
        active_max=args.active,
        queued_max=args.queue,
        steps_per_second=args.tokens_per_second,
        wait_seconds=args.claim_seconds,
    )
    loop = StepLoop(model, replicator, loop_options)
    if args.link:
        replicator.start()
        if not replicator.wait_connected(_LINK_WAIT_SECONDS):
            print(f"no daemon yet, going on without: {replicator.counts.refusal}", file=sys.stderr)
    loop.start()
    acked = AckedOptions(seconds=args.acked_seconds, late=Late(args.acked_late))
    _serve(EngineServer(model, loop, replicator, acked), listener)
    loop.close()
    if args.link:
        replicator.close()
    return 0


def _serve(server: EngineServer, listener: socket.socket) -> None:
    config = uvicorn.Config(
        server.app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    host, port = listener.getsockname()[:2]
    web = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn puts handlers of its own in place a moment later, and raises the signal anew when it has served its
        # last answer; what comes before them must end it too.
        signal.signal(number, lambda *_: setattr(web, "should_exit", True))
    print(f"ready http://{host}:{port}", flush=True)  # the kernel queues connections from here on
    web.run(sockets=[listener])


def _model(args: argparse.Namespace) -> StepModel:
    if args.engine == "synthetic":
        return SyntheticModel(SyntheticOptions(row_bytes=args.row_bytes, weights=args.weights))
    from kvlog.engines.models import ensure_model  # noqa: PLC0415  # torch and transformers take seconds to import
    from kvlog.engines.transformers import TransformersModel  # noqa: PLC0415

    folder = ensure_model(args.model, progress=lambda said: print(said, file=sys.stderr))
    if folder.warning:
        print(folder.warning, file=sys.stderr)
    return TransformersModel.load(folder.path, dtype=DType(args.dtype), threads=args.threads)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= ACKED_SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not over 0 and at most {ACKED_SECONDS_MAX:g}")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvlog.engines", description=__doc__)
    engines = parser.add_subparsers(dest="engine", required=True)
    synthetic = engines.add_parser(
        "synthetic", help="no model: every byte of the cache matters to the next token"
    )
    synthetic.add_argument(
        "--row-bytes", type=int, default=4096, help="of one position; a multiple of 64 (4096)"
    )
    synthetic.add_argument("--weights", type=int, default=0, help="another number, another model (0)")
    transformers = engines.add_parser("transformers", help="a Hugging Face causal language model on the CPU")
    transformers.add_argument(
        "--model", default="small", help="its folder, or small: a trained one is fetched, or random (small)"
    )
    transformers.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(float32)")
    transformers.add_argument(
        "--threads", type=int, default=1, help="of torch; fixed, so that numerics are (1)"
    )
    for engine in (synthetic, transformers):
        engine.add_argument("--link", help="the daemon's unix socket; without, nothing is logged")
        engine.add_argument("--host", default="127.0.0.1", help="to listen on (127.0.0.1)")
        engine.add_argument("--port", type=int, default=0, help="to listen on; 0: any free one (0)")
        engine.add_argument(
            "--tokens-per-second", type=float, default=0.0, help="of each answer; 0: no limit (0)"
        )
        engine.add_argument("--active", type=int, default=32, help="requests computed at once (32)")
        engine.add_argument("--queue", type=int, default=64, help="requests that wait; more get 503 (64)")
        engine.add_argument(
            "--claim-seconds", type=float, default=1.0, help="a request waits for its claim (1.0)"
        )
        engine.add_argument(
            "--acked-seconds",
            type=_seconds,
            default=2.0,
            help="acked: a token is held for so long at most (2.0)",
        )
        engine.add_argument(
            "--acked-late",
            choices=list(Late),
            default=Late.DEGRADE,
            help="acked: what is late does (degrade)",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
