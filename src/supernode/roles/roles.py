"""Which products of the graph are columns and which rows, so that what lies between them is split and nothing is sent?

A *row* is a product with a parameter whose summed dim is split: its output is a sum over the ranks. From each row, the
wish for a split input travels backward through the rules; where it ends in products whose output dim is a parameter's
dim, these are the *columns*. A wish that meets something without a rule, or a value that others need whole, ends there:
that value stays whole on every rank, and each takes its part of it. So a wish never fails, it only splits less; a row
that finds no column is left whole, since it would send and save little.

Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3, for columns, rows and the split vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.fx import GraphModule, Node

from supernode.roles.contracting import contraction_of
from supernode.roles.ops import given, name_of, where
from supernode.roles.rules import Demand, Demands, Want, merged, needs_of
from supernode.roles.seeds import Seed, candidates, parameter_behind, tensor_of, widening
from supernode.roles.shards import Split

HEAD = 4.0
"""Output over input above which a product is a head: inner layers are up to 4 times as wide, vocabularies 8 or more."""
_SILENT = frozenset({"_assert_tensor_metadata", "_guards_fn", "call_module"})


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
    seeds = sorted(candidates(module, parts), key=finder.turn)
    chosen: list[Seed] = []
    dropped: dict[Seed, str] = {}
    stops: dict[Node, str] = {}
    banned: set[Seed] = set()
    begun: dict[Seed, set[Node]] = {}
    ways: dict[Seed, dict[Node, Want]] = {}
    while True:
        for seed in seeds:
            if seed in chosen or seed in banned:
                continue
            # A look-up saves its table's memory by itself; the others must find a column.
            alone = finder.walk([seed], rows={other.node for other in chosen}, shared=True)
            if seed.kind == "look-up":
                reason = ""
            elif seed.kind == "row" and any(seed.node in begun[other] for other in chosen):
                reason = "it begins another split"
            else:
                reason = finder.flaw(seed, alone) or _contradiction(alone, [ways[other] for other in chosen])
            ways[seed] = {node: want for node, want in alone.wants.items() if node.op == "get_attr"}
            begun[seed] = set(finder.columns(alone))
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


def _contradiction(alone: Roles, ways: list[dict[Node, Want]]) -> str:
    """Say which parameter a candidate wants split in another way than those before it; empty where none."""
    for way in ways:
        for node, want in way.items():
            if alone.wants.get(node, want) != want:
                return f"`{node.target}` is split in another way already"
    return ""


class _Finder:
    def __init__(self, module: GraphModule, parts: int) -> None:
        self.module, self.parts = module, parts
        self.nodes = list(module.graph.nodes)
        self.place = {node: index for index, node in enumerate(self.nodes)}

    def turn(self, seed: Seed) -> tuple[int, int]:
        """Return when a candidate's turn is: look-ups, heads, rows, other outputs, each in the order of the graph.

        A head shares the table of tokens, or is several times as wide as its input: as a row it would have all its
        logits summed.
        """
        if seed.kind == "look-up":
            return 0, self.place[seed.node]
        if seed.kind == "row":
            return 2, self.place[seed.node]
        alone = self.walk([seed], rows=set(), shared=True)
        tied = any(name_of(user) == "embedding" for node in alone.wants if node.op == "get_attr" for user in node.users)
        wide = any(widening(node) > HEAD for node in self.columns(alone))
        return 1 if tied or wide else 3, self.place[seed.node]

    def columns(self, roles: Roles) -> list[Node]:
        """Return the products and look-ups whose output is split as their parameter is."""
        found = []
        for node in roles.wants:
            if node.op == "call_function" and (contraction_of(node) is not None or name_of(node) == "embedding"):
                sources = [operand for operand in roles.needs[node] if parameter_behind(operand, self.module)]
                if any(operand in roles.wants for operand in sources):
                    found.append(node)
        return found

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
        if set(behind).intersection(self.columns(roles)):
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


def _silent(user: Node, want: Want) -> bool:
    """Whether a reader does not care how a value is split."""
    name = name_of(user)
    if name == "sym_size":
        return bool(isinstance(want, Split) and user.args[1] != want.dim)
    return name in _SILENT and not (name == "_assert_tensor_metadata" and any(user.args[1:3]))
