from typing import Any

class Report:
    ranks: list[dict[str, Any]]
    config: dict[str, tuple[Any, Any]]
    links: list[dict[str, Any]]
    warnings: list[str]
    def __init__(
        self, ranks: list[dict[str, Any]], config: dict[str, tuple[Any, Any]], links: list[dict[str, Any]]
    ) -> None: ...

def doctor() -> Report: ...
