"""kvlog: an event-sourced replication daemon for LLM KV caches (the library both sides share)."""

__all__: list[str] = []
