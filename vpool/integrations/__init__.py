"""One pool under other libraries: each module here is for one of them, and imports it when it is first used."""

__all__: list[str] = []
