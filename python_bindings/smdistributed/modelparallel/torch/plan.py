"""The plan of a model, for people: a table in a terminal and in a notebook."""

import html
import json


class Plan:
    """Prints as the table that rank 0 prints at the first step. `as_dict`: the same for programs (docs/partitioning.md)."""

    def __init__(self, text, as_json):
        self._text = text
        self.as_dict = json.loads(as_json) if as_json else {}

    def __bool__(self):
        return bool(self._text)

    def __str__(self):
        return self._text

    __repr__ = __str__

    def _repr_html_(self):
        rows = [line.split("|") for line in self._text.splitlines()]
        lines = []
        for row in rows:
            cell = "th" if row is rows[0] else "td"
            span = "" if len(row) > 1 else f' colspan="{len(rows[0])}"'
            lines.append("<tr>" + "".join(f"<{cell}{span}>{html.escape(each.strip())}</{cell}>" for each in row) + "</tr>")
        return f"<table>{''.join(lines)}</table>"
