"""Every setting of kvlogd: a TOML file, then environment variables (KVLOG_LOG__URL=...), typed and checked at start.

An unknown or misspelt key is an error, never ignored. Units are in the names. Secrets never show in output.
"""

from __future__ import annotations

import difflib
import os
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvlog.errors import ConfigError
from kvlog.log.settings import LogSettings
from kvlog.modes import parse_sync_mode

__all__ = ["Settings", "load_settings"]

MIB = 1 << 20
_PREFIX = "KVLOG_"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeSettings(_Section):
    """Who this daemon is."""

    id: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=128,
        description="The node's name in the cluster, unique; the host name if not set.",
    )


class LinkSettings(_Section):
    """The connection to engines on this machine."""

    socket: Path = Field(Path("/run/kvlog/kvlogd.sock"), description="Where engines connect.")
    ring_bytes: int = Field(64 * MIB, ge=1 * MIB, le=1 << 34, description="Row ring of each engine process.")
    engines_max: int = Field(16, ge=1, le=1024, description="Engine processes connected at once.")
    uids: frozenset[int] = Field(
        frozenset(), description="User ids beside root and our own that may connect."
    )
    gids: frozenset[int] = Field(frozenset(), description="Group ids that may connect.")
    claim_wait_ms_max: int = Field(
        10_000, ge=1, le=600_000, description="The longest a request may wait for its turn."
    )


class PoolSettings(_Section):
    """The buffer that standbys apply to and engines attach from."""

    bytes: int = Field(1 << 30, ge=1 * MIB, description="Size of the pool, allocated at start.")
    block_bytes: int = Field(1 * MIB, ge=4096, le=1 << 30, description="Size of a block; at least one row.")
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]{1,2})$")] = Field(
        "cpu", description="cpu, or cuda:N (experimental)."
    )
    high_percent: int = Field(85, ge=1, le=100, description="Past this share idle sessions are evicted.")
    low_percent: int = Field(70, ge=0, le=100, description="Down to this share.")
    idle_seconds: int = Field(
        3600, ge=1, description="A session that was not written for so long is evicted."
    )

    @model_validator(mode="after")
    def _marks_are_ordered(self) -> Self:
        if self.low_percent >= self.high_percent:
            raise ValueError(f"low_percent {self.low_percent} must be below high_percent {self.high_percent}")
        if self.block_bytes > self.bytes:
            raise ValueError(f"one block of {self.block_bytes} bytes does not fit pool.bytes {self.bytes}")
        return self


class SyncSettings(_Section):
    """What is published of a session, and how."""

    mode: str = Field(
        "full", description="full, every:TOKENS,TIMEms or ids; an engine may ask otherwise per session."
    )
    codec: Literal["auto", "raw", "lz4", "split_zstd"] = Field("auto", description="How rows are encoded.")
    codec_cores: float = Field(
        0.5, ge=0, le=1024, description="CPU cores that `auto` may spend on compression."
    )
    bandwidth_bytes_per_second: int | None = Field(
        None, ge=1 << 16, description="Cap on what is published; none: no cap."
    )

    @field_validator("mode")
    @classmethod
    def _mode_is_known(cls, value: str) -> str:
        try:
            parse_sync_mode(value)
        except ConfigError as error:
            raise ValueError(f"{error.problem}; {error.fix}") from error
        return value


class PrimarySettings(_Section):
    """What this node does for the sessions that it owns."""

    rewrite_when_left: float = Field(
        0.25,
        ge=0,
        le=0.9,
        allow_inf_nan=False,
        description="An idle session of ours is logged again when its first record has this share of its retention"
        " left; 0: never.",
    )
    ttl_seconds: int = Field(
        0, ge=0, description="A session of ours that was not used for so long is ended for good; 0: never."
    )


class FollowSettings(_Section):
    """Which partitions this node keeps warm."""

    partitions: Literal["all"] | tuple[int, ...] = Field(
        "all", description='"all", or a list of partition numbers.'
    )


class MetricsSettings(_Section):
    """The Prometheus endpoint."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int | None = Field(
        None, ge=0, le=65_535, description="TCP port; none: no endpoint; 0: any free one."
    )


class DiagnosticsSettings(_Section):
    """What is said on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least that is written."
    )
    format: Literal["auto", "json", "text"] = Field(
        "auto", description="auto: text on a terminal, else JSON lines."
    )


class Settings(BaseSettings):
    """All settings of one daemon."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    node: NodeSettings = Field(default_factory=NodeSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    link: LinkSettings = Field(default_factory=LinkSettings)
    pool: PoolSettings = Field(default_factory=PoolSettings)
    sync: SyncSettings = Field(default_factory=SyncSettings)
    primary: PrimarySettings = Field(default_factory=PrimarySettings)
    follow: FollowSettings = Field(default_factory=FollowSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    diagnostics: DiagnosticsSettings = Field(default_factory=DiagnosticsSettings)

    @model_validator(mode="after")
    def _follows_what_there_is(self) -> Self:
        listed = () if self.follow.partitions == "all" else self.follow.partitions
        outside = [p for p in listed if not 0 <= p < self.log.partitions]
        if outside:
            raise ValueError(f"follow.partitions names {outside}, the log has 0 to {self.log.partitions - 1}")
        return self

    @classmethod
    def settings_customise_sources(  # pydantic-settings' own interface
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment first, then what the file says; no dotenv, no secrets directory."""
        del settings_cls, dotenv_settings, file_secret_settings
        return (env_settings, init_settings)


def load_settings(path: Path | None) -> Settings:
    """Read the TOML file and the environment.

    Args:
        path: the file; None: environment and defaults only.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or a setting is unknown or out of range; all are named.
    """
    values = _read_toml(path) if path else {}
    _refuse_unknown_environment()
    try:
        return Settings(**values)
    except ValidationError as error:
        raise _as_config_error(error) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            setting=str(path), problem=f"cannot be read: {error.strerror}", fix="name a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            setting=str(path), problem=f"is not TOML: {error}", fix="correct the line named"
        ) from error


def _refuse_unknown_environment() -> None:
    """pydantic-settings ignores a misspelt top-level name in the environment; we do not."""
    sections = {name.upper() for name in Settings.model_fields}
    for name in os.environ:
        if name.startswith(_PREFIX) and "__" in name:
            section = name.removeprefix(_PREFIX).split("__", 1)[0]
            if section not in sections:
                near = difflib.get_close_matches(section, sections, 1)
                fix = (
                    f"did you mean {_PREFIX}{near[0]}__...?"
                    if near
                    else f"sections are {', '.join(sorted(sections))}"
                )
                raise ConfigError(setting=name, problem="no such section", fix=fix)


def _as_config_error(error: ValidationError) -> ConfigError:
    problems = []
    for item in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in item["loc"]) or "settings"
        problems.append(f"{where}: {_said(item['type'], item['msg'], item['loc'])}")
    return ConfigError(
        setting="; ".join(problems), problem=f"{len(problems)} setting(s) refused", fix="correct them"
    )


def _said(kind: str, message: str, where: tuple[int | str, ...]) -> str:
    if kind != "extra_forbidden":
        return message.removeprefix("Value error, ")
    near = difflib.get_close_matches(str(where[-1]), _names_beside(where), 1)
    return "no such setting" + (f"; did you mean {near[0]}?" if near else "")


def _names_beside(where: tuple[int | str, ...]) -> list[str]:
    model: Any = Settings
    for part in where[:-1]:
        field = model.model_fields.get(str(part))
        if field is None:
            return []
        model = field.annotation
    return list(getattr(model, "model_fields", {}))
