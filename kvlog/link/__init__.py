"""The control connection between an engine process and its daemon, both ends of it."""

__all__: list[str] = []
