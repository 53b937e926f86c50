"""A plan's model made real on one rank: its stages built, filled, split over tensor and data, ties remembered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from supernode.axes.context import attention_over, places_of
from supernode.errors import ModelError
from supernode.models.decoder import Attention, Decoder
from supernode.models.experts import Experts, Mixture
from supernode.parallel.chance import seed_for, seed_generators
from supernode.parallel.graphs import Trial, check_count, divide_module, loss_of, needs_graph, tell, ties
from supernode.parallel.mesh import Place
from supernode.parallel.mixture import spread_experts
from supernode.parallel.recompute import recompute_block, recompute_stage, recompute_user
from supernode.parallel.sharding import check_hooks, check_shardable, shard
from supernode.parallel.tensor import split_block, split_embedding, split_head
from supernode.parallel.usercode import build_user_model
from supernode.precision.casting import cast_weights, compute_in_float32
from supernode.precision.float8 import multiply_in_float8
from supernode.roles.shards import Split
from supernode.schema.job import JobSpec
from supernode.schema.model import DecoderShape
from supernode.schema.plan import Plan, Stage
from supernode.splitting.divide import Kept
from supernode.splitting.proof import prove

Tie = tuple[tuple[str, ...], tuple[int, ...]]
"""Names of one shared parameter, and the pipeline ranks that hold it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True, kw_only=True)
class Parts:
    """What one rank holds of the model.

    Attributes:
        stages: the rank's stages with their modules, in pipeline order.
        tied: for each parameter that other stages hold too, its names and the pipeline ranks that hold it.
        divided: the user's module as a graph in parts, where it is run so.
        notes: what is to be told of those parts, by subject.
    """

    stages: list[tuple[Stage, nn.Module]]
    tied: list[Tie]
    divided: Kept | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def segments(self) -> dict[str, Split]:
        """How each parameter and buffer is split that a tensor rank holds in several pieces."""
        report = self.divided.report if self.divided is not None else None
        return {held.name: held.split for held in report.segmented if held.split} if report is not None else {}

    @property
    def modules(self) -> list[nn.Module]:
        """The stages' modules."""
        return [module for _, module in self.stages]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once under its canonical name in the whole model."""
        alias = {name: names[0] for names, _ in self.tied for name in names}
        seen: set[str] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                canonical = alias.get(name, name)
                if canonical not in seen:
                    seen.add(canonical)
                    yield canonical, parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each persistent buffer under its name."""
        for module in self.modules:
            kept = module.state_dict(keep_vars=True).keys()
            yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


def assemble(plan: Plan, place: Place | None, trial: Trial | None = None) -> Parts:
    """Build this rank's part of the model; the whole model where `place` is None.

    Args:
        trial: a micro-batch, with which the user's module is made a graph where the plan takes it apart.

    Raises:
        ModelError: the user's model cannot be loaded, or cannot be cut as the plan wants.
    """
    shape = plan.job.shape
    if shape is None:
        return _user_parts(plan, place, trial)
    shape = replace(shape, vocabulary=plan.vocabulary)
    mine = [stage for stage in plan.stages if place is None or stage.rank == place.pipeline]
    if place is None:
        whole = Stage(index=0, rank=0, first=0, last=shape.layers, embeds=True, heads=True)
        return Parts(stages=[(whole, _decoder(shape, whole, plan.job, None))], tied=[])
    stages: list[tuple[Stage, nn.Module]] = []
    for stage in mine:
        module = _decoder(shape, stage, plan.job, place)
        _share_tokens(module, place, plan.job.data.sequence)
        for block in module.blocks.values():
            recompute_block(block, place.layout.recompute)
        stages.append((stage, module))
    holders = tuple(sorted({stage.rank for stage in plan.stages if stage.embeds or stage.heads}))
    spread = shape.tied and len([stage for stage in plan.stages if stage.embeds or stage.heads]) > 1
    tied: list[Tie] = [(("embedding.weight", "head.weight"), holders)] if spread else []
    return Parts(stages=stages, tied=tied)


def _decoder(shape: DecoderShape, stage: Stage, job: JobSpec, place: Place | None) -> Decoder:
    """Build one stage unit by unit, so that no more than one unsplit block is in memory at a time."""
    seed, dtype = job.seed, DTYPES[job.precision]
    with torch.device("meta"):
        module = Decoder(shape, blocks=range(stage.first, stage.last), embeds=stage.embeds, heads=stage.heads)
    units: list[tuple[str, nn.Module]] = [(f"blocks.{number}", block) for number, block in module.blocks.items()]
    if module.embedding is not None:
        units.insert(0, ("embedding", module.embedding))
    if module.norm is not None and module.head is not None:
        units += [("norm", module.norm), ("head", module.head)]
    tied_here = shape.tied and module.embedding is not None and module.head is not None
    for name, unit in units:
        if not (name == "head" and tied_here):
            unit.to(dtype).to_empty(device="cpu")
            _fill(module, unit, name, seed)
        if place is not None and place.layout.tensor > 1:
            _split(name, unit, place, skip_weight=name == "head" and tied_here)
        if place is not None and isinstance(mixture := getattr(unit, "mlp", None), Mixture):
            spread_experts(mixture.experts, place)
        # Once it is split and before it is sharded, recomputed or tied: none of these may see another weight.
        if job.arithmetic == "float32":
            compute_in_float32(unit)
        elif job.arithmetic == "float8" and name.startswith("blocks."):
            multiply_in_float8(unit)
        if name == "head":
            module.tie()
        if name.startswith("blocks."):
            shard([*(part for part in unit.modules() if isinstance(part, Experts)), unit], place)
    shard([module], place)
    return module


def _share_tokens(module: Decoder, place: Place, sequence: int) -> None:
    """Tell a stage which tokens of the sequence its attention sees, and how to reach those of the other ranks."""
    layout = place.layout
    if layout.context == 1 and not layout.sequence:
        return
    module.places = places_of(sequence, rank=place.context, ranks=layout.context)
    if layout.context > 1:
        attend = attention_over(place.group("context"))
        for part in module.modules():
            if isinstance(part, Attention):
                part.attend = attend


def _split(name: str, unit: nn.Module, place: Place, *, skip_weight: bool) -> None:
    mesh = place.mesh["tensor"]
    if name.startswith("blocks."):
        split_block(unit, mesh, sequence=place.layout.sequence)
    elif name == "embedding":
        split_embedding(unit, mesh, sequence=place.layout.sequence)
    elif name == "head":
        if skip_weight:  # It will be the embedding's, split already; any matrix of the right shape serves until then.
            unit.to_empty(device="cpu")
        split_head(unit, mesh, sequence=place.layout.sequence)


def _fill(module: Decoder, unit: nn.Module, prefix: str, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in unit.named_parameters():
            full = f"{prefix}.{name}"
            canonical = "embedding.weight" if full == "head.weight" and module.shape.tied else full
            module.initialise(canonical, parameter, torch.Generator().manual_seed(seed_for(seed, canonical)))


def _user_parts(plan: Plan, place: Place | None, trial: Trial | None) -> Parts:
    seed_generators(seed_for(plan.job.seed, "model"))
    model = build_user_model(plan.job.module)
    if plan.job.arithmetic == "float32":  # Running statistics stay in float32, as what is computed with them.
        cast_weights(model, DTYPES[plan.job.precision])
    else:
        model = model.to(DTYPES[plan.job.precision])
    if place is not None:
        _check_alike(model, plan.job.module)
        check_hooks(model, place.layout)
    if trial is not None:
        trial.accepts(model)
    count = len(plan.stages)
    is_graph = place is not None and trial is not None and needs_graph(model, plan)
    if plan.job.arithmetic != "same":
        if is_graph:
            raise ModelError(
                f"`arithmetic` is {plan.job.arithmetic}, and the plan makes the module a graph, without layers",
                hint="set `arithmetic` to same, or `parallelism.tensor` and `parallelism.pipeline` to 1.",
            )
        if plan.job.arithmetic == "float32":
            compute_in_float32(model)
        else:
            multiply_in_float8(model, has_head=True)
    if is_graph and place is not None and trial is not None:
        parts = _graph_parts(model, plan, place, trial)
    elif place is None or count == 1:
        parts = Parts(stages=[(plan.stages[0], model)], tied=_user_ties(model, plan, 1) if place is not None else [])
    else:
        pieces = _cut_sequential(model, count, plan.stages)
        both = zip(plan.stages, pieces, strict=True)
        mine = [(stage, piece) for stage, piece in both if stage.rank == place.pipeline]
        parts = Parts(stages=mine, tied=_user_ties(model, plan, count))
    if place is not None:
        for module in parts.modules:
            (recompute_user if parts.divided is None else recompute_stage)(module, place.layout.recompute)
            if not list(module.parameters()) and place.layout.sharding == "fsdp":
                continue
            check_shardable(module, place)
            shard([module], place)
    return parts


def _graph_parts(model: nn.Module, plan: Plan, place: Place, trial: Trial) -> Parts:
    divided = divide_module(model, plan, place, trial)
    check_count(divided, plan, place, sum(parameter.numel() for parameter in model.parameters()))
    proof = prove(
        model, divided, inputs=trial.inputs, targets=trial.targets, evaluates=trial.evaluates,
        expected=loss_of(plan, place, None, trial.loss), measured=loss_of(plan, place, divided.kept, trial.loss),
    )  # fmt: skip
    stages: list[tuple[Stage, nn.Module]] = [
        (stage, divided.kept.pieces[stage.index].module) for stage in plan.stages if stage.index in divided.kept.pieces
    ]
    return Parts(stages=stages, tied=ties(divided, plan), divided=divided.kept, notes=tell(divided, proof))


def _check_alike(model: nn.Module, reference: str) -> None:
    """Check that every rank built the same values, which nothing later would put right."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).nan_to_num()
    extremes = torch.stack((sums, -sums))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    differing = [name for (name, _), high, low in zip(model.named_parameters(), *extremes, strict=True) if high != -low]
    if differing:
        raise ModelError(
            f"{reference} gives `{differing[0]}` other values on other ranks",
            hint="draw first values from torch's, numpy's or Python's own generators, which are seeded alike.",
        )


def _cut_sequential(model: nn.Module, count: int, stages: tuple[Stage, ...] = ()) -> list[nn.Module]:
    """Cut a sequence where stages say, or, where these do not know its length, into about equally many parameters.

    Children keep their names.
    """
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            f"the model is a {type(model).__name__}; only an nn.Sequential can be cut into {count} stages",
            hint="set `parallelism.pipeline` to 1, or return an nn.Sequential.",
        )
    children = list(model.named_children())
    if len(children) < count:
        raise ModelError(
            f"the model has {len(children)} modules in sequence, and the plan wants {count} stages",
            hint=f"set `parallelism.pipeline` × `interleave` to at most {len(children)}.",
        )
    if stages and stages[-1].last == len(children):
        return [nn.Sequential(OrderedDict(children[stage.first : stage.last])) for stage in stages]
    sizes = [1 + sum(p.numel() for p in child.parameters()) for _, child in children]
    pieces, start = [], 0
    for index in range(count):
        stop, target = start + 1, sum(sizes[start:]) / (count - index)
        while stop < len(children) - (count - index - 1) and sum(sizes[start : stop + 1]) <= target * 1.01:
            stop += 1
        stop = len(children) if index == count - 1 else stop
        pieces.append(nn.Sequential(OrderedDict(children[start:stop])))
        start = stop
    return list(pieces)


def _user_ties(model: nn.Module, plan: Plan, count: int) -> list[Tie]:
    """Find parameters that several modules share: their names, and the pipeline ranks that hold them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = [tuple(group) for group in names.values() if len(group) > 1]
    if not shared:
        return []
    if count == 1:
        return [(group, (0,)) for group in shared]
    home = {
        name: stage
        for stage, piece in zip(plan.stages, _cut_sequential(model, count, plan.stages), strict=True)
        for name, _ in piece.named_parameters(remove_duplicate=False)
    }
    for group in shared:
        stages = {home[name].index: home[name].rank for name in group}
        if plan.layout.sharding == "fsdp" and plan.layout.data > 1 and len(set(stages.values())) < len(stages):
            raise ModelError(
                f"`{group[0]}` is shared by two stages of one rank, which fsdp would shard apart",
                hint="set `parallelism.sharding` to replicas, or `parallelism.interleave` to 1.",
            )
    return [(group, tuple(sorted({home[name].rank for name in group}))) for group in shared]
