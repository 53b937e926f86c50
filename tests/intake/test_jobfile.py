from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from supernode.errors import RunError, SpecError
from supernode.intake.jobfile import job_from, job_to_dict, load_job
from supernode.schema.codec import from_json, to_json
from supernode.schema.event import StepDone
from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Layout, Plan
from supernode.schema.report import RunState
from supernode.schema.spread import Parallelism

JOB_FILE_PAGE = Path(__file__).parents[2] / "docs" / "job-file.md"

BAD_VALUES = [
    ("steps: yes", "`steps` is true", "100"),
    ("steps: 1e5", "`steps` is 100000.0", "write `100000`"),
    ('steps: "100"', '`steps` is "100"', "100"),
    ("steps: 010", '`steps` is "010"', "100"),
    ("steps: 0", "`steps` is 0", "choose 1"),
    ("steps:", "`steps` is empty", "leave it out"),
    ("steps: .nan", "`steps` is nan", "finite"),
    ("name: 123", "`name` is 123", "quotes"),
    ("name: ../up", "`name`", "letters"),
    ("stepz: 3", "unknown key `stepz`", "did you mean `steps`"),
    ("<<: {steps: 3}", "unknown key `<<`", "Known"),
    ("parallelism: {tensr: 2}", "unknown key `parallelism.tensr`", "did you mean `tensor`"),
    ("parallelism: {tensor: true}", "`parallelism.tensor` is true", "write, say, `1`"),
    ("parallelism: {tensor: 2.5}", "`parallelism.tensor` is 2.5", "leave it out"),
    ("parallelism:", "`parallelism` is empty", "leave it out"),
    ("parallelism: [8, 4, 16]", "`parallelism` is [8, 4, 16]", "tensor, pipeline, data"),
    ("parallelism: {sharding: fspd}", "`parallelism.sharding`", "did you mean `fsdp`"),
    ("parallelism: {interleave: 2}", "`parallelism.schedule`", "interleaved"),
    ("optimizer: {learning_rate: fast}", '`optimizer.learning_rate` is "fast"', "0.001"),
    ("optimizer: {learning_rate: .inf}", "`optimizer.learning_rate` is inf", "finite"),
    ("optimizer: {learning_rate: true}", "`optimizer.learning_rate` is true", "0.001"),
    ("optimizer: {betas: [0.9]}", "`optimizer.betas`", "[0.9, 0.95]"),
    ("optimizer: {betas: [0.9, x]}", "`optimizer.betas`", "[0.9, 0.95]"),
    ("optimizer: {betas: [0.9, 1.0]}", "`optimizer.betas`", "below 1"),
    ("checkpoint: {every: [1]}", "`checkpoint.every` is [1]", "50"),
    ("model: 3", "`model` is 3", "model: tiny"),
    ("model: [tiny]", '`model` is ["tiny"]', "model: tiny"),
    ("model: tinny", "`model` is 'tinny'", "presets"),
    ("model: {layrs: 3}", "unknown key `model.layrs`", "did you mean `layers`"),
    ("model: {layers: three}", '`model.layers` is "three"', "write, say, `4`"),
    ("model: {width: 100, heads: 3}", "`model.width`", "multiple"),
    ("data: {text: [3]}", "`data.text` is [3]", "stdlib"),
    ("data: {text: {a: b}}", "`data.text`", "stdlib"),
    ("data: {text: a.txt, tokens: b.bin}", "text and tokens", "one of"),
    ("data: {drop_last: 1}", "`data.drop_last` is 1", "false"),
    ("data: {tokenizer: 'bpe:9'}", "`data.tokenizer`", "257"),
    ("data: {dataset: digits}", "`data.dataset` is 'digits'", "my_model.py:digits"),
    ("data: {dataset: 'a.py:f', loss: 'b:c'}", "`data.loss` is 'b:c'", "my_model.py:digits"),
]


@pytest.mark.parametrize(("yaml", "named", "remedy"), BAD_VALUES, ids=[case[0] for case in BAD_VALUES])
def test_a_wrong_key_or_value_is_named_with_a_remedy(tmp_path: Path, yaml: str, named: str, remedy: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml)

    with pytest.raises(SpecError) as caught:
        load_job(file)

    assert named in caught.value.message
    assert remedy in caught.value.hint


BAD_FILES = [
    (b"", "is empty"),
    (b"# nothing but a remark\n", "is empty"),
    (b"- steps\n", "holds a list"),
    (b"tiny\n", "holds a str"),
    (b"steps: 1\nsteps: 2\n", "line 2, column 1: the key `steps` is there twice"),
    (b"model: {layers: 1, layers: 2}\n", "the key `layers` is there twice"),
    (b"a: &a [x]\nb: [*a, *a]\n", "anchors and aliases"),
    (b"steps: !!python/object/apply:os.system [ls]\n", "the tag"),
    (b"steps: 1: 2\n", "line 1, column 9"),
    (b"\tsteps: 1\n", "line 1, column 1"),
    (b"1: 2\n", "the key 1 is not text"),
    (b"? [a, b]\n: 1\n", "is not text"),
    (b"x: " + b"[" * 40 + b"]" * 40, "nested more than 16 deep"),
    (b"steps: 1\0\n", "NUL"),
    (b"name: \xff\xfe\n", "UTF-8"),
    (b"name: \x07\n", "not YAML"),
    (b"steps: " + b"1" * 5000, "not YAML"),
    (b"steps: 1\n---\nsteps: 2\n", "another document"),
    (b"#" * (2**20 + 1), "1 MiB"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES, ids=[case[1] for case in BAD_FILES])
def test_a_file_that_is_no_job_is_named_with_the_place_and_a_remedy(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)

    with pytest.raises(SpecError) as caught:
        load_job(file)

    assert str(file) in caught.value.message
    assert message in caught.value.message
    assert caught.value.hint


def test_a_file_that_cannot_be_opened_is_a_spec_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for name, message in (("none.yaml", "does not exist"), (".", "folder"), ("pipe", "not a regular file")):
        with pytest.raises(SpecError, match=message):
            load_job(tmp_path / name)
    with pytest.raises(SpecError, match="cannot be read"):
        load_job(tmp_path / ("x" * 300))


def test_the_job_of_the_specification_is_read(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("parallelism: {tensor: 8, pipeline: 4, data: 16}\ngradient_accumulation: 8\nmodel: gpt3-13b\n")

    job = load_job(file)

    assert job.parallelism == Parallelism(tensor=8, pipeline=4, data=16)
    assert job.gradient_accumulation == 8


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("steps: 1_000\noptimizer: {learning_rate: 3e-3, clip: 1, betas: [0.9, 0.99]}\nname: 2024-01-31\n")

    job = load_job(file)

    assert (job.steps, job.optimizer.learning_rate, job.optimizer.clip) == (1000, 0.003, 1.0)
    assert job.name == "2024-01-31"


def test_paths_are_taken_from_the_folder_of_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "jobs" / "job.yaml"
    file.parent.mkdir()
    file.write_text("model: net.py:build\ndata: {dataset: 'd.py:train', held_out_dataset: '../e.py:f', loss: 'l.py:g'}")
    text = tmp_path / "jobs" / "text.yaml"
    text.write_text("data: {text: [notes/*.txt, stdlib, /abs.txt]}")

    job = load_job(file)

    assert job.module == f"{tmp_path}/jobs/net.py:build"
    assert job.data.dataset == f"{tmp_path}/jobs/d.py:train"
    assert job.data.held_out_dataset == f"{tmp_path}/e.py:f"
    assert job.data.loss == f"{tmp_path}/jobs/l.py:g"
    assert load_job(text).data.text == (f"{tmp_path}/jobs/notes/*.txt", "stdlib", "/abs.txt")


def test_overrides_replace_and_add_keys(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("steps: 5\nparallelism: {tensor: 2}\n")

    job = load_job(file, overrides={"parallelism.data": 2, "steps": 7, "checkpoint.every": 3})

    assert (job.steps, job.checkpoint.every) == (7, 3)
    assert job.parallelism == Parallelism(tensor=2, data=2)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("parallelism.dat", 2, "parallelism.dat"), ("model.layers", 2, "`model`"), ("steps", float("inf"), "`steps`")],
)
def test_a_wrong_override_is_named(tmp_path: Path, key: str, value: object, named: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: tiny\n")

    with pytest.raises(SpecError, match=named) as caught:
        load_job(file, overrides={key: value})

    assert caught.value.hint


def test_a_job_survives_the_way_to_a_dictionary_and_back() -> None:
    job = job_from({"model": {"layers": 2}, "data": {"text": ["a", "b"]}, "optimizer": {"betas": (0.8, 0.9)}})

    assert job_from(job_to_dict(job)) == job
    assert job.model == DecoderShape(layers=2)
    assert job_from({}) == JobSpec()


def test_a_python_mapping_with_foreign_values_is_refused() -> None:
    with pytest.raises(SpecError, match=r"`data\.text` is a PosixPath"):
        job_from({"data": {"text": Path("a.txt")}})
    with pytest.raises(SpecError, match="the key 3"):
        job_from({"data": {3: 4}})


def test_values_survive_the_codec() -> None:
    job = JobSpec(model=DecoderShape(vocabulary=256))
    plan = Plan(job=job, layout=Layout(), machine="m", cards=(0, 1), micro_batch=1, micro_batches=2, stages=())
    state = RunState(plan=plan, losses={1: 5.5}, repeats=[(1, True)])

    assert from_json(Plan, to_json(plan)) == plan
    assert from_json(RunState, to_json(state)) == state


def test_a_diverged_loss_survives_the_codec() -> None:
    done = StepDone(
        step=1, incarnation=0, loss=float("inf"), seconds=1, tokens=3, norm=float("nan"), rate=0.1, parts={}
    )

    back = from_json(StepDone, to_json(done))

    assert back.loss == float("inf")
    assert back.norm != back.norm
    assert replace(back, norm=0.0) == replace(done, norm=0.0)


def test_a_record_that_is_cut_short_is_a_run_error() -> None:
    with pytest.raises(RunError, match="StepDone") as caught:
        from_json(StepDone, '{"step": 1')

    assert caught.value.hint


def test_the_page_of_the_job_file_has_every_key_with_its_default() -> None:
    (block,) = re.findall(r"```yaml\n(name: run\n.*?)```", JOB_FILE_PAGE.read_text(encoding="utf-8"), re.DOTALL)

    told = yaml.safe_load(block)

    assert told == job_to_dict(JobSpec())


def test_the_page_of_the_job_file_names_every_key_of_a_shape() -> None:
    page = JOB_FILE_PAGE.read_text(encoding="utf-8")

    missing = [each.name for each in fields(DecoderShape) if not re.search(rf"\b{each.name}[`:]", page)]

    assert missing == []


@pytest.mark.parametrize("count", [0, -1])
def test_experts_of_a_token_are_held_against_their_limits_where_there_are_no_experts_yet(count: int) -> None:
    with pytest.raises(SpecError, match=r"`model.experts_per_token` is"):
        DecoderShape(experts_per_token=count)
