"""What the commands that advise say, write and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from supernode.control.supernode import SuperNode
from supernode.intake.jobfile import load_job
from supernode.schema.spread import Parallelism

Command = Callable[..., tuple[int, str, str]]
JOB = (
    "name: small\nmodel: {layers: 4, width: 256, heads: 8, kv_heads: 4}\nbatch: 32\nprecision: bfloat16\nsteps: 5000\n"
)
NET = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def digits():
    return torch.utils.data.TensorDataset(torch.zeros(16, 4), torch.zeros(16, dtype=torch.long))
"""
LLAMA = ("--model", "llama3-8b", "--batch", "64", "--sequence", "2048")


@pytest.fixture
def command(tmp_path: Path, terminal: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the command line, in a folder with a job that names no degrees."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "job.yaml").write_text(JOB)

    return terminal


def said(answer: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = answer
    assert code == 0, err
    value: dict[str, Any] = json.loads(out)
    return value


def test_a_job_without_degrees_is_searched_on_a_machine_of_the_catalogue(command: Command) -> None:
    found = said(command("plan", "job.yaml", "--machine", "8xH100", "--json"))

    best = found["best"]
    assert [choice["seconds"] for choice in best] == sorted(choice["seconds"] for choice in best)
    assert best[0]["seconds"] <= min(choice["seconds"] for choice in found["front"])
    assert sum(best[0]["parts"].values()) == pytest.approx(best[0]["seconds"])
    assert best[0]["binds"] == max(best[0]["saved_by_10_percent"], key=best[0]["saved_by_10_percent"].get)
    assert all(choice["runnable"] == (not choice["obstacles"]) for choice in best)
    assert best[1]["why"].startswith("loses")


def test_a_job_with_degrees_is_planned_as_it_stands(command: Command) -> None:
    plan = said(
        command("plan", "job.yaml", "--machine", "8xH100", "--set", "parallelism.data=4", "--json")
    )  # fmt: skip

    assert plan["layout"]["data"] == 4
    # On this computer a job without degrees is planned as `run` would run it.
    here = said(command("plan", "job.yaml", "--cards", "2", "--json"))
    assert (here["layout"]["tensor"], here["layout"]["data"]) == (1, 2)


@pytest.mark.slow
def test_a_model_of_one_s_own_is_planned_and_cannot_be_searched(command: Command, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "own.yaml").write_text("model: net.py:build\ndata: {dataset: 'net.py:digits'}\nbatch: 8\n")

    plan = said(command("plan", "own.yaml", "--machine", "8xH100", "--json"))
    code, _, err = command("plan", "own.yaml", "--machine", "8xH100", "--search")

    assert plan["layout"]["data"] == 8
    assert (code, "is your own" in err) == (2, True)


def test_the_best_runnable_plan_is_written_and_planned_again(command: Command, tmp_path: Path) -> None:
    found = said(command("plan", "job.yaml", "--machine", "8xH100", "--write", "best.yaml", "--json"))

    job = load_job(tmp_path / "best.yaml")
    axes = found["best"][0]["axes"]
    assert (job.name, job.steps, job.batch) == ("small", 5000, 32)
    assert (job.parallelism.tensor, job.parallelism.pipeline, job.parallelism.data) == (
        axes["tensor"], axes["pipeline"], axes["data"],
    )  # fmt: skip
    plan = said(command("plan", "best.yaml", "--machine", "8xH100", "--json"))
    assert plan["micro_batch"] == axes["micro_batch"]
    code, _, err = command("plan", "job.yaml", "--machine", "8xH100", "--write", "best.yaml")
    assert (code, "best.yaml exists" in err) == (2, True)


def test_a_search_says_in_words_what_binds_and_what_our_trainer_lacks(command: Command) -> None:
    code, out, _ = command("plan", *LLAMA, "--machine", "16xH100", "--top", "2")

    assert code == 0
    for words in ("plan 1", "wins by", "plan 2", "loses", "10% more of it saves", "what binds", "of the peak FLOP/s",
                  "that none beats in time, memory, energy and cost", "forecast only: our trainer lacks"):  # fmt: skip
        assert words in out, words
    assert "plan 3" not in out


@pytest.mark.parametrize("objective", ["memory", "energy", "cost"])
def test_another_objective_finds_less_of_it(command: Command, objective: str) -> None:
    key = {"memory": "bytes", "energy": "joules", "cost": "usd"}[objective]
    fast, least = (
        said(command("plan", *LLAMA, "--machine", "16xH100", "--objective", each, "--json"))["best"][0]
        for each in ("time", objective)
    )

    assert least[key] <= fast[key]
    assert least["seconds"] >= fast["seconds"]


def test_a_public_mixture_can_be_forecast_but_not_trained(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(
        "model: mixtral-8x7b\nbatch: 64\nprecision: bfloat16\ndata: {sequence: 4096}\n"
    )

    found = said(command("plan", "mixture.yaml", "--machine", "64xH100", "--json"))
    refused = command("run", "mixture.yaml")
    unwritable = command("plan", "mixture.yaml", "--machine", "64xH100", "--write", "best.yaml")

    assert not any(choice["runnable"] for choice in found["best"])
    assert "such models" in found["best"][0]["obstacles"]
    assert (refused[0], "our trainer does not build" in refused[2], "--search" in refused[2]) == (2, True, True)
    assert (unwritable[0], "our trainer builds dense" in unwritable[2]) == (2, True)


def test_machines_are_compared_and_one_on_which_nothing_fits_says_why(command: Command, tmp_path: Path) -> None:
    words = ("--tokens", "1T", "--machines", "64xH100,64xB200,1xH100", "--json", "--out", "pictures")
    value = said(command("compare", "--model", "llama3-405b", "--batch", "64", "--sequence", "2048", *words))

    first, second, third = value["machines"]
    assert value["winner"] == "64xB200"
    assert (second["place"], first["place"]) == (1, 2)
    assert "fits" in third["trouble"]
    assert "project" not in third
    project = second["project"]
    assert project["tokens"] == pytest.approx(1e12, rel=1e-6)
    assert second["tokens_per_second"] == pytest.approx(64 * 2048 / project["step_seconds"])
    assert {Path(file).name for file in value["files"]} == {"compare.html", "compare.svg", "compare.json"}
    ElementTree.parse(tmp_path / "pictures" / "compare.svg")


def test_a_comparison_in_words_names_the_winner_and_why(command: Command) -> None:
    code, out, _ = command("compare", *LLAMA, "--steps", "1000", "--machines", "8xH100,8xA100-80")

    assert code == 0
    assert "8xH100: 8xA100-80 takes" in out
    assert "times the peak FLOP/s" in out


def test_a_project_adds_up(command: Command, tmp_path: Path) -> None:
    value = said(command("forecast", *LLAMA, "--machine", "16xH100", "--tokens", "100B", "--out", "p", "--json"))

    assert value["steps"] == -(-100_000_000_000 // (64 * 2048))
    times = value["seconds"]
    assert times["p10"] < times["p50"] < times["p90"]
    assert value["card_hours"]["p50"] == pytest.approx(times["p50"] * 16 / 3600)
    assert value["kg_co2"]["p50"] == pytest.approx(value["joules"]["p50"] / 3.6e6 * 0.39, rel=0.01)
    assert value["goodput"]["p50"] < 1
    assert len(value["assumptions"]) >= 5
    assert (tmp_path / "p" / "project.html").read_text().startswith("<!doctype html>")


def test_a_project_is_told_in_words(command: Command) -> None:
    code, out, _ = command("forecast", "job.yaml", "--machine", "16xH100", "--mtbf", "100h", "--price", "2.5")

    assert code == 0
    for words in ("goodput", "restarts", "card-hours", "PUE", "t CO2" if "t CO2" in out else "kg CO2", "assumed",
                  "one card fails every 100 h", "2.50 USD an hour"):  # fmt: skip
        assert words in out, words


def test_a_search_draws_its_front(command: Command, tmp_path: Path) -> None:
    found = said(command("plan", *LLAMA, "--machine", "16xH100", "--out", "pictures", "--json"))

    drawing = ElementTree.parse(tmp_path / "pictures" / "front.svg").getroot()
    circles = [node for node in drawing.iter() if node.tag.endswith("circle")]
    assert len(circles) == len(found["front"])
    assert (tmp_path / "pictures" / "search.html").exists()
    assert json.loads((tmp_path / "pictures" / "search.json").read_text())["best"] == found["best"]


def test_a_plan_draws_the_job_s_own_degrees(command: Command, tmp_path: Path) -> None:
    words = ("plan", "job.yaml", "--machine", "8xH100", "--set", "parallelism.data=4", "--out", "pictures", "--json")
    plan = said(command(*words))

    assert plan["layout"]["data"] == 4
    assert [Path(file).name for file in plan["files"]] == ["timeline.svg", "trace.json", "waterfall.svg"]
    boxes = json.loads((tmp_path / "pictures" / "trace.json").read_text())["traceEvents"]
    step = sum(value for name, value in plan["step"].items() if name != "total")
    assert max(box["ts"] + box["dur"] for box in boxes if box["ph"] == "X") == pytest.approx(1e6 * step, rel=0.05)
    searched = said(command(*words[:-3], "--search", "--out", "found", "--json"))
    assert {Path(file).name for file in searched["files"]} == {"search.html", "front.svg", "search.json"}


def test_where_no_machine_can_do_it_the_reasons_are_an_error(command: Command) -> None:
    words = ("--model", "llama3-405b", "--batch", "8", "--sequence", "8192", "--tokens", "1T")
    code, out, err = command("compare", *words, "--machines", "1xH100,2xA100-80")

    assert (code, out) == (2, "")
    for part in ("no machine can do it", "1xH100: none of", "on 1 card fits", "2xA100-80: none of", "on 2 cards fits",
                 "\nhint: take more cards"):  # fmt: skip
        assert part in err, err


def test_best_steps_are_told_apart_from_what_comes_on_top(command: Command) -> None:
    value = said(command("forecast", *LLAMA, "--machine", "16xH100", "--steps", "1000", "--overhead", "1.5", "--json"))
    _, out, _ = command("forecast", *LLAMA, "--machine", "16xH100", "--steps", "1000")

    assert value["best_steps_seconds"] == pytest.approx(1000 * value["step_seconds"])
    assert value["overhead"] == 1.5
    assert "ideal_seconds" not in value
    assert value["seconds"]["p50"] > 1.4 * value["best_steps_seconds"]
    assert "its best steps alone" in out
    assert "without failures" not in out


def test_an_assumed_shape_is_noted_wherever_it_is_asked_about(command: Command) -> None:
    asked = ("--model", "nemotron-3.5-lightning", "--batch", "64", "--sequence", "4096", "--json")
    plan = said(command("plan", *asked, "--machine", "64xH100", "--top", "1"))
    compared = said(command("compare", *asked, "--machines", "64xH100", "--tokens", "1B"))
    forecast = said(command("forecast", *asked, "--machine", "64xH100", "--tokens", "1B"))

    for notes in (plan["notes"], compared["notes"], forecast["assumptions"]):
        assert any("nemotron-3.5-lightning is partly assumed: all of it" in note for note in notes)


def test_a_search_says_where_its_best_plan_lies(command: Command) -> None:
    words = ("plan", *LLAMA, "--machine", "64xH100")
    code, out, _ = command(*words, "--top", "1")
    found = said(command(*words, "--top", "1", "--json"))

    lies, axes = found["placement"], found["best"][0]["axes"]
    assert code == 0
    assert "where plan 1 lies" in out
    assert set(lies["order"]) == {name for name in ("tensor", "context", "data", "pipeline") if axes[name] > 1}
    assert all(len(group) == axes["tensor"] for group in lies["tensor_groups"])


def test_hardware_without_a_price_says_nothing_of_dollars(command: Command) -> None:
    words = (*LLAMA, "--card", "TPU-v4", "--cards", "16", "--interconnect", "3D_Torus")
    code, out, _ = command("plan", *words)
    plain = said(command("plan", *words, "--json"))
    priced = said(command("plan", *words, "--objective", "cost", "--price", "2", "--json"))

    assert code == 0
    assert "USD" not in out
    assert "that none beats in time, memory and energy at once" in out
    assert plain["best"][0]["usd"] is None
    assert priced["best"][0]["usd"] == pytest.approx(16 * priced["best"][0]["seconds"] * 2 / 3600)


def test_a_simulation_names_what_a_forecast_takes_otherwise(command: Command) -> None:
    value = said(
        command("simulate", "job.yaml", "--machine", "8xH100", "--set", "parallelism.data=8", "--set", "steps=10",
                "--json")
    )  # fmt: skip

    fails, saves, steps = value["assumptions"]
    assert ("no card fails" in fails, "50,677 h" in fails) == (True, True)
    assert ("every 50 steps" in saves, "10 min" in saves) == (True, True)
    assert "1.32 times" in steps


def test_the_same_in_python(tmp_path: Path) -> None:
    node = SuperNode.named("8xH100")
    plans = node.search({"model": "llama2-7b", "batch": 64, "precision": "bfloat16"}, runnable=True, top=1)

    assert plans.best.axes["cards"] == 8
    assert not plans.obstacles[0]
    assert node.plan({"model": "tiny"}).layout.data == 8
    assert Parallelism() == Parallelism(data=0)


REFUSED: list[tuple[str, tuple[str, ...]]] = [
    ("plan", ("no FILE", "--model llama3-70b")),
    ("plan --model llama3-70b", ("how much of llama3-70b", "`--batch`")),
    ("plan --model lama3-70b --batch 8 --sequence 128", ("unknown model `lama3-70b`", "did you mean `llama3-70b`")),
    ("plan --model llama3-8b --batch 0 --sequence 128 --machine 8xH100", ("batch of 0", "`--batch`")),
    ("plan --model llama3-8b --batch 8 --sequence 1", ("of 1 tokens",)),
    ("plan --model llama3-8b --batch 8 --sequence 128 --precision fp7", ("unknown precision `fp7`", "float8")),
    ("plan --model llama3-8b --batch 8 --sequence 128 --set batch=3", ("`--set`", "FILE")),
    ("plan job.yaml --search --objective beauty", ("unknown objective `beauty`", "energy")),
    ("plan job.yaml --search --top 0", ("`top` is 0",)),
    ("plan job.yaml --batch 0 --search", ("`batch` is 0",)),
    ("plan job.yaml --model gpt-9 --search", ("gpt-9", "presets")),
    ("plan job.yaml --machine 8xH10", ("unknown card `H10`", "did you mean")),
    ("plan job.yaml --machine 0xH100", ("`card_count` is 0",)),
    ("plan job.yaml --machine 8xH100/Moebius", ("Moebius", "Hybrid")),
    ("plan job.yaml --machine 8xH100 --out job.yaml", ("job.yaml", "--out")),
    ("plan --model llama3-405b --batch 8 --sequence 8192 --machine 1xH100", ("fits into 72 GB a card", "more cards")),
    ("plan --model deepseek-v3 --batch 8 --sequence 128 --machine 8xH100 --runnable", ("our trainer builds",)),
    ("compare job.yaml", ("no machines", "--machines")),
    ("compare job.yaml --machines supernode-7", ("unknown machine `supernode-7`", "supernode-512", "512xH100")),
    ("compare job.yaml --machines 8xH100,8xH100", ("`8xH100` is named twice",)),
    ("compare job.yaml --machines 8xH100 --objective beauty", ("unknown objective `beauty`",)),
    ("compare --machines 8xH100", ("no FILE",)),
    ("forecast --model llama3-8b --batch 8 --sequence 128 --machine 8xH100/Switched --tokens 1.4X", ("1.4X", "1.4T")),
    ("forecast job.yaml --tokens 0", ("`--tokens` is 0", "above 0")),
    ("forecast job.yaml --tokens -1T", ("-1T",)),
    ("forecast job.yaml --steps 0", ("`--steps` is 0",)),
    ("forecast job.yaml --tokens 1B --steps 5", ("`--tokens` or `--steps`",)),
    ("forecast job.yaml --mtbf 0 --machine 8xH100", ("`--mtbf` is 0",)),
    ("forecast job.yaml --price 0", ("`--price` is 0",)),
    ("forecast job.yaml --overhead 0.9", ("`overhead` is 0.9", "1 or more")),
    ("forecast job.yaml --grid -1", ("`grid` is", "0 or more")),
    ("plan job.yaml --card TPU-v4 --cards 8 --objective cost", ("TPU-v4 has no price", "`--price`")),
    ("plan --model llama3-8b --batch 8 --sequence 128 --precision float8 --machine 8xH100 --runnable",
     ("does not compute in float8", "--precision")),
    ("forecast job.yaml --mtbf 1s --machine 8xH100", ("leave no time", "more reliable cards")),
    ("forecast --model mixtral-8x7b --batch 64 --sequence 128 --machine 64xH100", ("how much to train", "`--tokens`")),
    ("forecast --model llama3-70b --batch 64 --sequence 128 --machine 64xH100", ("how much to train", "`--tokens`")),
    ("compare --model llama3-70b --batch 64 --sequence 128 --machines 64xH100", ("how much to train", "`--steps`")),
    ("forecast job.yaml --tokens=", ("`--tokens` is ''", "1.4T")),
    ("forecast job.yaml --tokens 1e300", ("steps", "up to 1,000,000,000,000")),
    ("forecast job.yaml --steps 1000000000000000000000000000000", ("1e+30 steps", "`--steps` up to")),
    ("forecast job.yaml --overhead 1e300", ("`overhead` is 1e+300", "up to 1000")),
    ("forecast job.yaml --grid 1e308", ("`grid` is", "up to 100")),
    ("plan --model llama3-8b --batch 8 --sequence 128 --precision nvfp4 --machine 8xA100-80",
     ("A100-80 does not compute in nvfp4", "float16, bfloat16, float32")),
    ("compare job.yaml --machines 8xH100,8xh100", ("`8xH100` is named twice",)),
    ("plan job.yaml --machine ٥١٢xH100", ("unknown machine", "512xH100")),
    ("forecast none.yaml --tokens 1T", ("none.yaml", "does not exist")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "named"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_makes_no_sense_is_refused_with_a_remedy(command: Command, words: str, named: tuple[str, ...]) -> None:
    code, out, err = command(*words.split())

    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert "\nhint: " in err
    assert "Traceback" not in err
    for part in named:
        assert part in err, err
