"""Pure cores: the fold, the primary's numbering, the take-over and lag. No clock, no I/O, no randomness."""

__all__: list[str] = []
