"""The bytes of a record: frame, header, payload codecs, cutting to size. Normative text: docs/format.md."""

__all__: list[str] = []
