"""A strict reader of traces: what the trace event format of Chrome and Perfetto allows, of the parts that are used."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

#: The longest error of a number in a file, in microseconds: it has three decimals.
ROUNDED = 2e-3


class TraceFile:
    """A trace that is as it should be: numbers are finite, the spans of a track nest, each track has a name, and each
    flow has one start and one end, which lie in spans. Events of other processes, or of torch, are only counted."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text(), parse_constant=self._refuse)
        assert data["displayTimeUnit"] == "ms"
        runs = data["penstock"]
        self.events: list[dict[str, Any]] = data["traceEvents"]
        self.base: int = data["baseTimeNanoseconds"]
        self.runs: list[dict[str, Any]] = [runs] if isinstance(runs, dict) else runs
        self.counts: dict[str, int] = defaultdict(int)
        #: The spans of each track, by process and track.
        self.tracks: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
        self.names: dict[tuple[Any, Any], str] = {}
        self._flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in self.events:
            self._take(event)
        for place in self.tracks:
            self._check_nesting(place)
        for flow in self._flows.values():
            self._check_flow(flow)

    def _refuse(self, text: str) -> NoReturn:
        raise AssertionError(f"{text} is no number of JSON")

    def _take(self, event: dict[str, Any]) -> None:
        phase, place = event["ph"], (event.get("pid"), event.get("tid"))
        self.counts[phase] += 1
        assert isinstance(event["name"], str)
        if phase == "M":
            if event["name"] == "thread_name":
                self.names[place] = event["args"]["name"]
            return
        assert math.isfinite(float(event["ts"])), event
        if phase == "X":
            assert float(event["dur"]) >= 0, event
            self.tracks[place].append(event)
        elif event.get("cat") == "batch" and phase in "sf":
            assert isinstance(event["id"], int)
            self._flows[event["id"]].append(event)

    def _check_nesting(self, place: tuple[Any, Any]) -> None:
        assert place in self.names or place[0] not in {run["pid"] for run in self.runs}, f"{place} has no name"
        stack: list[float] = []
        for span in sorted(self.tracks[place], key=lambda span: (span["ts"], -span["dur"])):
            began, ended = span["ts"], span["ts"] + span["dur"]
            while stack and stack[-1] <= began + ROUNDED:
                stack.pop()
            assert not stack or ended <= stack[-1] + ROUNDED, f"{span} ends after the one around it, at {stack[-1]}"
            stack.append(ended)

    def _check_flow(self, flow: list[dict[str, Any]]) -> None:
        first, last = sorted(flow, key=lambda event: event["ts"])
        assert (first["ph"], last["ph"], last["bp"]) == ("s", "f", "e"), flow
        for event in flow:
            spans = self.tracks[event["pid"], event["tid"]]
            around = [s for s in spans if s["ts"] - ROUNDED <= event["ts"] <= s["ts"] + s["dur"] + ROUNDED]
            assert around, f"{event} lies in no span"

    def track(self, name: str, run: int = 0) -> list[dict[str, Any]]:
        """The spans of the track whose name begins so."""
        pid = self.runs[run]["pid"]
        (place,) = (place for place, other in self.names.items() if place[0] == pid and other.startswith(name))
        return self.tracks[place]

    def seconds(self, track: str, *, category: str | None = None, name: str | None = None) -> float:
        """How long the spans of a track take together."""
        spans = self.track(track)
        return sum(s["dur"] for s in spans if category in (None, s["cat"]) and name in (None, s["name"])) / 1e6

    def named(self, name: str) -> list[dict[str, Any]]:
        """All events of this name."""
        return [event for event in self.events if event["name"] == name]
