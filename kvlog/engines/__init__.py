"""Adapters that run inside an engine process. They never import the log."""

__all__: list[str] = []
