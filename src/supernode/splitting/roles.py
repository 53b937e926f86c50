"""Which products of the graph are columns and which rows, so that what lies between them is split and nothing is sent?

A *row* is a product with a parameter whose summed dim is split: its output is a sum over the ranks. From each row, the
wish for a split input travels backward through the rules; where it ends in products whose output dim is a parameter's
dim, these are the *columns*. A wish that meets something without a rule, or a value that others need whole, ends there:
that value stays whole on every rank, and each takes its part of it. So a wish never fails, it only splits less; a row
that finds no column is left whole, since it would send and save little.

Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3, for columns, rows and the split vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.fx import GraphModule, Node

from supernode.splitting.contracting import contraction_of
from supernode.splitting.ops import given, is_tensor, name_of, shape, where
from supernode.splitting.rules import Demand, Demands, Want, merged, needs_of
from supernode.splitting.shards import Split

_SILENT = frozenset({"_assert_tensor_metadata", "_guards_fn", "call_module"})


@dataclass(frozen=True, slots=True, eq=False)
class Seed:
    """Where a wish for a split begins.

    Attributes:
        node: a row, a look-up of tokens, or the graph's output.
        needs: the inputs that it wants split.
        holds: the parameter that is split for it; None at the output.
        kind: `row`, `look-up` or `output`.
    """

    node: Node
    needs: dict[Node, Split]
    holds: Node | None
    kind: str


@dataclass(slots=True)
class Roles:
    """Who is split and how, and why not.

    Attributes:
        wants: how each split node's output is split.
        needs: what each split node, row and look-up wants of its inputs.
        seeds: rows, look-ups and outputs that are split.
        stops: why a wish ended at a node.
        dropped: why a row, look-up or output is not split.
    """

    wants: dict[Node, Want] = field(default_factory=dict)
    needs: dict[Node, Demands] = field(default_factory=dict)
    seeds: list[Seed] = field(default_factory=list)
    stops: dict[Node, str] = field(default_factory=dict)
    dropped: dict[Node, str] = field(default_factory=dict)


def find_roles(module: GraphModule, parts: int) -> Roles:
    """Return the roles of a graph's nodes for `parts` tensor ranks; nothing is changed."""
    finder = _Finder(module, parts)
    seeds = sorted(finder.candidates(), key=finder.turn)
    chosen: list[Seed] = []
    dropped: dict[Seed, str] = {}
    stops: dict[Node, str] = {}
    banned: set[Seed] = set()
    while True:
        for seed in seeds:
            if seed in chosen or seed in banned:
                continue
            # A look-up saves its table's memory by itself; the others must find a column.
            alone = finder.walk([seed], rows={other.node for other in chosen}, shared=True)
            reason = "" if seed.kind == "look-up" else finder.taken(seed, chosen) or finder.flaw(seed, alone)
            if reason:
                dropped[seed] = reason
                stops.update(alone.stops)
            else:
                chosen.append(seed)
                dropped.pop(seed, None)
        roles = finder.walk(chosen, rows={seed.node for seed in chosen}, shared=False)
        flaws = {seed: reason for seed in chosen if (reason := finder.flaw(seed, roles))}
        if not flaws:
            break
        # The last one goes first: what it wanted may have been what others could not have; and others may come again.
        worst = max(flaws, key=seeds.index)
        dropped[worst] = flaws[worst]
        chosen.remove(worst)
        banned.add(worst)
    roles.dropped = {seed.node: reason for seed, reason in dropped.items()}
    roles.stops = {**stops, **roles.stops}
    return roles


def parameter_behind(node: Node, module: GraphModule) -> Node | None:
    """Return the parameter that a node is, up to its shape and type; None where it is something computed."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    if node.op != "get_attr" or not isinstance(tensor_of(module, node), nn.Parameter):
        return None
    return node


def tensor_of(module: GraphModule, node: Node) -> object:
    """Return the parameter or buffer of a `get_attr` node."""
    assert isinstance(node.target, str)
    owner, _, last = node.target.rpartition(".")
    return getattr(module.get_submodule(owner), last)


class _Finder:
    def __init__(self, module: GraphModule, parts: int) -> None:
        self.module, self.parts = module, parts
        self.nodes = list(module.graph.nodes)
        self.place = {node: index for index, node in enumerate(self.nodes)}
        self.tokens = self._from_inputs()

    def candidates(self) -> Iterable[Seed]:
        """Yield every place where a split could begin, in the order of the graph."""
        for node in self.nodes:
            if node.op == "output":
                yield from self._outputs(node)
            elif name_of(node) == "embedding":
                if (found := self._look_up(node)) is not None:
                    yield found
            elif node.op == "call_function" and (found := self._row(node)) is not None:
                yield found

    def turn(self, seed: Seed) -> tuple[int, int]:
        """Return when a candidate's turn is: what narrows ends a split well, what widens begins one.

        So a head comes before all rows, then rows that narrow, keep or widen their input, then other outputs.
        """
        if seed.kind == "output":
            alone = self.walk([seed], rows=set(), shared=True)
            return 1 if any(_widens(node) > 0 for node in self._columns(alone)) else 5, self.place[seed.node]
        return (0 if seed.kind == "look-up" else 3 + _widens(seed.node)), self.place[seed.node]

    def taken(self, seed: Seed, chosen: list[Seed]) -> str:
        """Say whether a candidate's product is a column for others already; empty where it is not."""
        rows = {other.node for other in chosen}
        if seed.kind == "row" and seed.node in self._columns(self.walk(chosen, rows=rows, shared=True)):
            return "it begins another split"
        return ""

    def _columns(self, roles: Roles) -> list[Node]:
        """Return the products and look-ups whose output is split as their parameter is."""
        found = []
        for node in roles.wants:
            if node.op == "call_function" and (contraction_of(node) is not None or name_of(node) == "embedding"):
                sources = [operand for operand in roles.needs[node] if parameter_behind(operand, self.module)]
                if any(operand in roles.wants for operand in sources):
                    found.append(node)
        return found

    def _row(self, node: Node) -> Seed | None:
        product = contraction_of(node)
        if product is None or len(product.summed) != 1 or (name_of(node) in ("addmm", "baddbmm") and not _plain(node)):
            return None
        (label,) = product.summed
        held = [parameter_behind(operand, self.module) for operand, _ in product.operands]
        if (held[0] is None) == (held[1] is None):
            return None
        needs = {}
        for operand, labels in product.operands:
            dim = labels.index(label)
            size = shape(operand)[dim]
            if not isinstance(size, int) or Split(dim, (size,)).refusal(self.parts):
                return None
            needs[operand] = Split(dim, (size,))
        return Seed(node, needs, held[0] or held[1], "row")

    def _look_up(self, node: Node) -> Seed | None:
        weight = given(node, "weight")
        table = parameter_behind(weight, self.module)
        if table is None or table is not weight:
            return None
        split = Split(0, (shape(weight)[0],))
        if given(node, "sparse") or given(node, "scale_grad_by_freq"):
            return None
        # A table of positions is read in the same places by all: splitting it would only send more.
        if given(node, "indices") not in self.tokens or split.refusal(self.parts):
            return None
        return Seed(node, {table: split}, table, "look-up")

    def _outputs(self, node: Node) -> Iterable[Seed]:
        for value in node.all_input_nodes:
            if is_tensor(value) and value.meta["val"].is_floating_point() and len(shape(value)) > 1:
                size = shape(value)[-1]
                split = Split(len(shape(value)) - 1, (size,)) if isinstance(size, int) else None
                if split is not None and not split.refusal(self.parts):
                    yield Seed(node, {value: split}, None, "output")

    def walk(self, seeds: list[Seed], *, rows: set[Node], shared: bool) -> Roles:
        """Let the wishes of seeds travel backward.

        Args:
            rows: products that cannot be columns.
            shared: let a parameter be split even though others read it, too.
        """
        asked: dict[Node, dict[Node, Demand]] = {}
        roles = Roles(seeds=list(seeds))
        for seed in seeds:
            for operand, split in seed.needs.items():
                asked.setdefault(operand, {})[seed.node] = split
            roles.needs[seed.node] = {**roles.needs.get(seed.node, {}), **seed.needs}
        pending = set(asked)
        latest = max((self.place[node] for node in pending), default=-1)
        for node in reversed(self.nodes[: latest + 1]):
            if node not in pending:
                continue
            pending.discard(node)
            found = self._answer(node, asked[node], rows, shared=shared)
            if isinstance(found, str):
                roles.stops[node] = found
                # One of several outputs, or a slice, cannot be split where its source is whole.
                for reader in [reader for reader, asks in asked[node].items() if not isinstance(asks, Split)]:
                    del roles.wants[reader], roles.needs[reader]
                    roles.stops[reader] = found
                continue
            roles.wants[node], needs = found
            if node.op == "call_function":
                roles.needs[node] = needs
            for operand, demand in needs.items():
                asked.setdefault(operand, {})[node] = demand
                pending.add(operand)
            if not pending:
                break
        return roles

    def _answer(
        self, node: Node, asked: dict[Node, Demand], rows: set[Node], *, shared: bool
    ) -> tuple[Want, Demands] | str:
        if node.op == "placeholder":
            return "it is an input of the model"
        want = merged(node, list(asked.values()))
        if isinstance(want, str):
            return want
        readers = [user for user in node.users if user not in asked and not _silent(user, want)]
        if readers and not (shared and node.op == "get_attr"):
            return f"{where(readers[0])} needs it whole"
        if node.op == "get_attr":
            assert isinstance(want, Split)
            is_state = any(name_of(user) == "batch_norm" for user in node.users)
            if not is_state and not isinstance(tensor_of(self.module, node), nn.Parameter):
                return "it is a constant, of which each rank takes its part"
            return want.refusal(self.parts) or (want, {})
        if node in rows:
            return "it is a sum over the ranks, which ends another split"
        needs = needs_of(node, want, self.parts)
        return needs if isinstance(needs, str) else (want, needs)

    def flaw(self, seed: Seed, roles: Roles) -> str:
        """Say why a seed cannot stay, given where its wishes went; empty where it can."""
        if seed.holds is not None and seed.holds not in roles.wants:
            return f"its weight is used in another way as well ({roles.stops.get(seed.holds, 'as a whole')})"
        if seed.kind == "look-up":
            return ""
        behind, ends = self._behind(seed, roles), []
        for node in behind:
            if node not in roles.wants:
                ends.append(node)
            elif name_of(node) == "batch_norm" and any(
                isinstance(state := given(node, name), Node) and state not in roles.wants
                for name in ("running_mean", "running_var")
            ):
                return "running statistics that others read as well cannot be split"
        if set(behind).intersection(self._columns(roles)):
            return ""
        inputs = any(node.op == "placeholder" for node in ends)
        reasons = [f"{where(node)}: {roles.stops[node]}" for node in ends if node in roles.stops and not inputs]
        return reasons[0] if reasons else "it reads the model's input" if inputs else "it reads a constant"

    def _behind(self, seed: Seed, roles: Roles) -> list[Node]:
        weight = {operand for operand in seed.needs if parameter_behind(operand, self.module) is not None}
        seen: dict[Node, None] = {}
        left = [operand for operand in seed.needs if operand not in weight]
        while left:
            node = left.pop()
            if node not in seen:
                seen[node] = None
                left += roles.needs.get(node, {}) if node in roles.wants else {}
        return list(seen)

    def _from_inputs(self) -> set[Node]:
        """Return the nodes whose numbers, not only their shapes, come from the model's inputs."""
        found: set[Node] = set()
        shapes = {"sym_size", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full"}
        for node in self.nodes:
            if node.op == "placeholder" or (
                node.op == "call_function"
                and name_of(node) not in shapes
                and any(operand in found for operand in node.all_input_nodes)
            ):
                found.add(node)
        return found


def _plain(node: Node) -> bool:
    return bool(given(node, "beta") == 1 and given(node, "alpha") == 1)


def _widens(product: Node) -> int:
    """Return 1 where a product's output is wider than the dim that it sums over, 0 where it is as wide, else -1."""
    found = contraction_of(product)
    if found is None or len(found.summed) != 1:
        return 0
    (first, labels), (second, others) = found.operands
    own = [label for label in found.output if (label in labels) != (label in others)]
    into = shape(first)[labels.index(found.summed[0])]
    # The output's own dim of a weight is its last or, of a convolution, that of channels.
    widths = [shape(product)[found.output.index(label)] for label in own if label in ("n", "m") or label == own[-1]]
    out = widths[-1] if widths else into
    return (out > into) - (out < into) if isinstance(out, int) else 0


def _silent(user: Node, want: Want) -> bool:
    """Whether a reader does not care how a value is split."""
    name = name_of(user)
    if name == "sym_size":
        return bool(isinstance(want, Split) and user.args[1] != want.dim)
    return name in _SILENT and not (name == "_assert_tensor_metadata" and any(user.args[1:3]))
