"""Which weights a request's LoRA adapter has, as vLLM has loaded them. Imports nothing of vLLM.

An adapter's file is read once in an engine's life, when its first request comes: vLLM reads it then too, or has just
read it, and keeps what it has read. Asked again, the file might say what the engine does not have. So an adapter whose
file changes under a running engine cannot be seen, unless its request says that it is loaded in place; vLLM numbers an
adapter that was unloaded and loaded again anew.
"""

from __future__ import annotations

from collections import OrderedDict
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
    """Digests of adapters, each read once.

    Args:
        find_folder: where an adapter's files are, by the path that its request has; a name on the hub too.
    """

    def __init__(self, find_folder: Callable[[str], Path] = local_folder) -> None:
        self._find_folder = find_folder
        self._known: OrderedDict[tuple[int, str], Digest] = OrderedDict()

    def of(self, request: Any) -> Digest:  # noqa: ANN401 - theirs
        """The digest of a LoRARequest's weights; costs some milliseconds the first time.

        Raises:
            ConfigError: its files cannot be read; they may be, later.
        """
        key = (int(request.lora_int_id), str(request.lora_path))
        if key not in self._known or request.load_inplace:
            self._known[key] = adapter_digest(self._find_folder(key[1]))
        self._known.move_to_end(key)
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
        return self._known[key]
