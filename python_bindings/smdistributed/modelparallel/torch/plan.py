"""The plan of a model, for people: a table in a terminal, with a picture in a notebook."""

import html
import json

_COLOURS = {"forward": "#3b6fb6", "backward": "#2f8f5b", "send": "#9467bd"}  # those of the timeline
_LEFT, _WIDTH, _ROW, _MARGIN = 110, 700, 40, 24  # pixels


class Plan:
    """Prints as the table that rank 0 prints at the first step. `as_dict`: the same for programs (docs/partitioning.md);
    `svg`: a bar for each stage, of the time that it takes for one microbatch."""

    def __init__(self, text, as_json):
        self._text = text
        self.as_dict = json.loads(as_json) if as_json else {}

    def __bool__(self):
        return bool(self._text)

    def __str__(self):
        return self._text

    __repr__ = __str__

    @property
    def svg(self):
        stages = self.as_dict.get("stages", [])
        height = _ROW * len(stages) + 2 * _MARGIN
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _MARGIN}" height="{height}" '
            'font-family="sans-serif" font-size="12">'
        ]
        for index, (what, colour) in enumerate(_COLOURS.items()):
            lines.append(f'<text x="{_LEFT + 80 * index}" y="16" fill="{colour}">{what}</text>')
        longest = max((sum(_times(stage).values()) for stage in stages), default=0) or 1
        for number, stage in enumerate(stages):
            x, y = _LEFT, _MARGIN + _ROW * number
            lines.append(f'<text x="4" y="{y + 14}">stage {number}, rank {stage["rank"]}</text>')
            for what, us in _times(stage).items():
                width = _WIDTH * us / longest
                tip = f"<title>{what} {us:.1f} us</title>"
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{_COLOURS[what]}">{tip}</rect>'
                )
                x += width
            modules = stage["modules"] or ["-"]
            names = modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]}"
            lines.append(f'<text x="{_LEFT}" y="{y + 31}">{html.escape(names)}</text>')
        return "\n".join([*lines, "</svg>"])

    def _repr_html_(self):
        if not self:
            return "<i>no plan before the first step</i>"
        rows = [line.split("|") for line in self._text.splitlines()]
        for row in rows:  # names of modules may have the bar that is between columns
            end = 3 + max(len(row) - len(rows[0]), 0)
            row[2:end] = ["|".join(row[2:end])] if len(row) > 1 else []
        lines = []
        for row in rows:
            cell = "th" if row is rows[0] else "td"
            span = "" if len(row) > 1 else f' colspan="{len(rows[0])}"'
            lines.append("<tr>" + "".join(f"<{cell}{span}>{html.escape(each.strip())}</{cell}>" for each in row) + "</tr>")
        return f"{self.svg}<table>{''.join(lines)}</table>"


def _times(stage):
    """Of one microbatch, in microseconds."""
    return {what: stage[f"{what}_us"] for what in _COLOURS}
