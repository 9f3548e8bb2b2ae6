"""The replicated log: one interface, two implementations (a local directory, Kafka)."""

__all__: list[str] = []
