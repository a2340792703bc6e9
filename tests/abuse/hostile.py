"""Files that nobody should be handed: whole ones of every format, and ways to spoil them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

import scheduler as sc
from tests.support.plans import layered_plan
from tests.support.training_graphs import conv_net

KUSUMOTO = """3 4
0 4 x
1 4 y
2 4 z
forward
1 1
0 _
1
Convolution
-
forward
1 1
1 _
2
ReLU
-
backward
2 0
2 gradient
2 output
ReLU
-
backward
2 0
1 gradient
0 input
Convolution
-
"""

RAW = {
    "1e400": "1e400",
    "-1e400": "-1e400",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "a number of 5000 digits": "9" * 5000,
    "a number of 4000 digits": "9" * 4000,
    "a small number of many digits": "0." + "0" * 5000 + "1",
    "2^63": str(2**63),
    "2^61": str(2**61),
    "-1": "-1",
    "-0.0": "-0.0",
    "1.5": "1.5",
    "true": "true",
    "false": "false",
    "null": "null",
    "empty text": '""',
    "a lone surrogate": '"\\ud800"',
    "control characters": '"\\u0000\\u001b[31m\\n"',
    "right to left": '"\\u202e"',
    "text of 100000 characters": json.dumps("模" * 100_000),
    "code": json.dumps("__import__('os').system('true')"),
    "markup": json.dumps("<script>alert(1)</script>"),
    "lists 100 deep": "[" * 100 + "]" * 100,
    "lists 960 deep": "[" * 960 + "]" * 960,
    "lists 100000 deep": "[" * 100_000 + "]" * 100_000,
    "objects 900 deep": '{"a":' * 900 + "1" + "}" * 900,
    "an empty list": "[]",
    "an empty object": "{}",
    "a list of itself": '[["x"], ["x"], {"x": "x"}]',
}
"""Values as they stand in a file."""


def seeds() -> dict[str, bytes]:
    """Return a small whole file of every format, by name."""
    graph, chain = conv_net(2), sc.zoo.heterogeneous_chain(3)
    nodes = [{"id": i, "name": f"n{i}", "weight": 1.5, "size": 4, "backward": i > 1} for i in range(4)]
    links = [{"source": i, "target": i + 1} for i in range(3)]
    node_link = {"directed": True, "graph": {"name": "four", "order": [0, 1, 2, 3]}, "nodes": nodes, "links": links}
    return {
        "graph": json.dumps(graph.to_dict()).encode(),
        "chain": json.dumps(chain.to_dict()).encode(),
        "node-link": json.dumps(node_link).encode(),
        "computation graph": KUSUMOTO.encode(),
        "plan": json.dumps(layered_plan().to_dict()).encode(),
    }


def places(data: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value inside nested data, the whole left out."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def edited(data: Any, place: tuple[Any, ...], way: str, value: object) -> Any:
    """Return a copy with one entry replaced, dropped, doubled, renamed or swapped with its neighbor."""
    data = copy.deepcopy(data)
    inside = data
    for key in place[:-1]:
        inside = inside[key]
    key = place[-1]
    if way == "replace":
        inside[key] = value
    elif way == "drop":
        del inside[key]
    elif isinstance(inside, list):
        if way == "double":
            inside.insert(key, copy.deepcopy(inside[key]))
        else:
            inside[key], inside[key - 1] = inside[key - 1], inside[key]
    else:
        inside[f"{key} "] = inside.pop(key) if way == "rename" else copy.deepcopy(inside[key])
    return data


@st.composite
def spoiled(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw a file that was whole: values replaced, dropped and doubled, then bytes cut, changed and put in."""
    if whole.startswith(b"{") and draw(st.integers(0, 3)):
        data, raw = json.loads(whole), draw(st.lists(st.sampled_from(list(RAW)), min_size=1, max_size=3))
        for name in raw:
            found = list(places(data))
            if found:
                way = draw(st.sampled_from(["replace", "replace", "drop", "double", "rename", "swap"]))
                data = edited(data, draw(st.sampled_from(found)), way, f"RAW {name}")
        text = json.dumps(data)
        for name in raw:
            text = text.replace(json.dumps(f"RAW {name}"), RAW[name])
        whole = text.encode("utf-8", "surrogatepass")
        if draw(st.booleans()):
            return whole
    place = draw(st.integers(0, len(whole)))
    way = draw(st.sampled_from(["cut", "byte", "insert", "repeat", "number"]))
    if way == "cut":
        return whole[:place]
    if way == "byte":
        return whole[:place] + draw(st.binary(min_size=1, max_size=4)) + whole[place + 1 :]
    if way == "insert":
        return whole[:place] + draw(st.sampled_from(list(RAW.values()))).encode() + whole[place:]
    if way == "repeat":
        end = draw(st.integers(place, len(whole)))
        return whole[:end] + whole[place:]
    digits = [i for i, byte in enumerate(whole) if byte in b"0123456789"]
    at = draw(st.sampled_from(digits))
    return whole[:at] + str(draw(st.integers(-(10**30), 10**30))).encode() + whole[at + 1 :]
