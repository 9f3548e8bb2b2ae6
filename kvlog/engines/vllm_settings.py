"""The keys of kv_connector_extra_config."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ConnectorSettings", "CudaUse"]


class CudaUse(StrEnum):
    """Whether a cache on a GPU is served."""

    REFUSED = ""
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """How the connector behaves; every field is a key of kv_connector_extra_config.

    Args:
        link: kvlogd's unix socket.
        wait_seconds: how long a request waits at most for its session before it is computed instead; > 0.
        hold_seconds: how long a finished request's blocks are held to write what is behind; ≥ 0.
        hold_blocks_share: of all blocks, the share that may be held so; 0 to 1.
        step_bytes: rows that one step writes at most, beside one row a session; less where they cost over 2 ms; ≥ 1.
        staging_bytes: verified rows that wait to be loaded, of all sessions; ≥ 0.
        load_step_bytes: rows that are loaded within one step; a load that makes them more is done beside it; ≥ 0.
            Blocks that are filled beside the steps are shared with nobody before they are full (docs/adr/0006).
        compute_tokens: a request that has no more than so many to compute does not wait for its session's first turn
            here, unless it takes over; ≥ 0. None: a block of the scheduler's, 128 at most.
        any_version: serve a vLLM outside the tested window.
        cuda: `experimental`: serve a cache on a GPU, by code that has never run on one.
    """

    link: Path
    wait_seconds: float = 2.0
    hold_seconds: float = 2.0
    hold_blocks_share: float = 0.1
    step_bytes: int = 2 << 20
    staging_bytes: int = 2 << 30
    load_step_bytes: int = 0
    compute_tokens: int | None = None
    any_version: bool = False
    cuda: CudaUse = CudaUse.REFUSED

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> Self:
        """Read the keys.

        Raises:
            ConfigError: a key that does not exist, a value out of range, or no link.
        """
        known = {field.name for field in fields(cls)}
        for name in extra:
            if name not in known:
                raise _bad(name, "there is no such key", f"use one of {', '.join(sorted(known))}")
        link = extra.get("link")
        if not isinstance(link, str) or not link:
            raise _bad("link", "it is not given", "give the path of kvlogd's socket, as link.socket has it")
        return cls(
            link=Path(link),
            wait_seconds=_number(extra, "wait_seconds", (0.01, 600.0)),
            hold_seconds=_number(extra, "hold_seconds", (0.0, 600.0)),
            hold_blocks_share=_number(extra, "hold_blocks_share", (0.0, 1.0)),
            step_bytes=int(_number(extra, "step_bytes", (1, 1 << 40))),
            staging_bytes=int(_number(extra, "staging_bytes", (0, 1 << 50))),
            load_step_bytes=int(_number(extra, "load_step_bytes", (0, 1 << 50))),
            compute_tokens=_count_or_none(extra, "compute_tokens"),
            any_version=extra.get("any_version", False) is True,
            cuda=_cuda(extra.get("cuda", CudaUse.REFUSED)),
        )


# Slots hide the class's defaults behind descriptors: these are the values, read once.
_DEFAULTS = {field.name: field.default for field in fields(ConnectorSettings)}


def _number(extra: Mapping[str, object], key: str, bounds: tuple[float, float]) -> float:
    value = extra.get(key, _DEFAULTS[key])
    least, most = bounds
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _bad(key, f"{value!r} is not a number from {least:g} to {most:g}", "correct it")
    return value


def _count_or_none(extra: Mapping[str, object], key: str) -> int | None:
    return int(_number(extra, key, (0, 1 << 30))) if key in extra else None


def _cuda(value: object) -> CudaUse:
    if value not in set(CudaUse):
        raise _bad("cuda", f"{value!r} is not known", 'write "experimental", or leave it out')
    return CudaUse(str(value))


def _bad(key: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(setting=f"kv_connector_extra_config.{key}", problem=problem, fix=fix)
