"""Memory that two processes share: the row ring and the block pool."""

__all__: list[str] = []
