"""The timeline of a job, for people: a picture in a notebook, a table in a terminal (docs/timeline.md)."""

import json

from smdistributed.modelparallel import _engine


class Timeline:
    """A typical one of the recorded steps. Draws itself in a notebook, prints as the table of why ranks did not compute; `svg`
    is the drawing, `trace` the file that ui.perfetto.dev opens. False as long as there is none, and on other ranks than 0."""

    def __init__(self, text, svg, trace):
        self._text = text
        self.svg = svg
        self.trace = trace

    def __bool__(self):
        return bool(self.svg)

    def __str__(self):
        return self._text or "timeline: no step drawn. Rank 0 has one when timeline_steps steps behind the third have run."

    __repr__ = __str__

    def _repr_svg_(self):
        return self.svg or None


def timeline():
    """What the key `timeline` has recorded: smp.init({"timeline": "trace.json"}). On any rank, not collective."""
    trace = json.loads(_engine.config())["timeline"]
    if not trace:
        raise ValueError(
            "timeline: expected the key timeline in the configuration, got none, so nothing is recorded. Name a file for the "
            'trace: smp.init({"timeline": "trace.json"}), or SMP_CONFIG=\'{"timeline": "trace.json"}\'.'
        )
    return Timeline(*_engine.timeline_drawing(), trace)
