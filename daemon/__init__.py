"""kvlogd: the process beside an inference server. Settings, wiring, and the shells around kvlog's cores."""

__all__: list[str] = []
