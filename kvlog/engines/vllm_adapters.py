"""Which weights a request's LoRA adapter has, as vLLM has loaded them. Imports nothing of vLLM.

An adapter's file is read once in an engine's life, when its first request comes: vLLM reads it then too, or has just
read it, and keeps what it has read. Asked again, the file might say what the engine does not have. So an adapter whose
file changes under a running engine cannot be seen, unless its request says that it is loaded in place; vLLM numbers an
adapter that was unloaded and loaded again anew.

Reading an adapter of 59 MB took 15 to 73 ms on busy cores, from memory. It is done on a thread of its own: the
scheduler asks again, as it does while a turn is opened.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvlog.engines.transformers_identity import adapter_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.ids import Digest

__all__ = ["AdapterDigests", "local_folder"]

_REMEMBERED_MAX: Final = 4096
"""Adapters; who comes back after so many others is read again."""


def local_folder(place: str) -> Path:
    """A folder's name as vLLM understands it."""
    return Path(place).expanduser()


class AdapterDigests:
    """Digests of adapters, each read once. Used by one thread.

    Args:
        find_folder: where an adapter's files are, by the path that its request has; a name on the hub too. Called on
            another thread.
    """

    def __init__(self, find_folder: Callable[[str], Path] = local_folder) -> None:
        self._find_folder = find_folder
        self._reader = ThreadPoolExecutor(1, "kvlog-adapter")
        self._known: OrderedDict[tuple[int, str], Future[Digest]] = OrderedDict()

    def begin(self, request: Any) -> None:  # noqa: ANN401 - theirs
        """Begin to read a LoRARequest's weights, unless they are known."""
        key = _key(request)
        if key not in self._known or request.load_inplace:
            self._known[key] = self._reader.submit(self._read, key[1])
        self._known.move_to_end(key)
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)

    def of(self, request: Any) -> Digest | None:  # noqa: ANN401 - theirs
        """The digest of a LoRARequest's weights, once they are read; None: ask again. `begin` comes first.

        Raises:
            ConfigError: its files cannot be read; the next request's `begin` tries again.
        """
        reading = self._known.get(_key(request))
        if reading is None:  # forgotten meanwhile, for others
            self.begin(request)
            return None
        if not reading.done():
            return None
        if reading.exception() is not None:
            del self._known[_key(request)]
        return reading.result()

    def close(self) -> None:
        """Nothing more is read."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, place: str) -> Digest:
        return adapter_digest(self._find_folder(place))


def _key(request: Any) -> tuple[int, str]:  # noqa: ANN401 - theirs
    return int(request.lora_int_id), str(request.lora_path)
