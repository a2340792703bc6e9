"""Names in a plan are data to the executor too: it writes code from positions, never from names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import scheduler as sc
from tests.abuse.tally import BOOK

pytestmark = pytest.mark.abuse


@pytest.mark.parametrize(
    "name", ["\"]; open('RAN', 'w') #{}", "x = open('RAN', 'w') #{}", "{{open('RAN', 'w')}}{}", "del {}"]
)
def test_what_a_plan_calls_things_never_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from scheduler.pytorch import checkpointed, trace

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.GELU())
    batch = torch.randn(16, 8)
    graph = trace(model, (batch,), loss=torch.sum, costs="flops")
    own = {tensor.name: name.format(number) for number, tensor in enumerate(graph.tensors)}
    renamed = replace(
        graph,
        tensors=[replace(t, name=own[t.name], storage=f"of {t.storage} {name}") for t in graph.tensors],
        operations=[
            replace(
                entry,
                name=name.format(f"op{number}"),
                inputs=[own[read] for read in entry.inputs],
                outputs=[own[made] for made in entry.outputs],
            )
            for number, entry in enumerate(graph.operations)
        ],
        resident=[own[entry] for entry in graph.resident],
        results=[own[entry] for entry in graph.results],
        required=[name.format(f"op{graph.index.operation_ids[entry]}") for entry in graph.required],
    )
    tally = BOOK.of("plans that would be code")
    plan = tally.attempt(sc.make_plan, renamed, "80%", time_limit=5.0)
    module = tally.attempt(checkpointed, model, plan, (batch,), loss=torch.sum)
    assert not isinstance(module, sc.SchedulerError), module
    loss = module(batch)
    loss.backward()
    tally.accept(torch.equal(loss, torch.sum(model(batch))), "another loss")
    tally.accept(list(tmp_path.iterdir()) == [], "a name was run")
