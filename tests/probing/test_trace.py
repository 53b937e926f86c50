"""What is traced without values is what closed forms, publications and real runs say."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.checkpoint import checkpoint

from supernode.errors import ModelError
from supernode.models.decoder import Decoder
from supernode.parallel.tensor import cross_entropy
from supernode.planning.work import block_forward_flops, head_forward_flops
from supernode.probing import trace
from supernode.probing.trace import trace_module
from supernode.schema.model import PRESETS
from supernode.schema.trace import ModelTrace
from supernode.workload.convolution import RESNETS, resnet, resnet_demand, resnet_parameters

pytestmark = pytest.mark.slow


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.skip = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def make_resnet(depth: int, *, base: int = 64) -> nn.Sequential:
    """Return a ResNet of He et al., arXiv:1512.03385, as a sequence of its blocks."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, base, 7, 2, 3, bias=False), nn.BatchNorm2d(base), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inputs = base
    for stage, blocks in enumerate(RESNETS[depth]):
        width = base * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Bert(nn.Module):
    """BERT-base's shape (Devlin et al., arXiv:1810.04805) from PyTorch's own encoder, pooler included."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 30_522) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, width) for n in (words, 512, 2))
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, F.gelu, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm(self.words(tokens) + places + self.kinds(torch.zeros_like(tokens)))
        return torch.tanh(self.pooler(self.encoder(x)[:, 0]))


def batches(*shape: int, classes: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.rand(samples, *shape), torch.zeros(samples, dtype=torch.int64))


def tokens(length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.zeros(samples, length, dtype=torch.int64),) * 2


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.float().sum()


def kept_for_real(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Any, Tensor], Tensor]) -> int:
    """Return the bytes that a real forward leaves for its backward, parameters and buffers left out."""
    fixed = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model(batch[0]), batch[1])
    return sum(storage.nbytes() for storage in held.values())


def kept(trace: ModelTrace, samples: int) -> float:
    return sum(part.kept.of(samples) for part in trace.parts)


def test_the_reference_decoder_has_the_counts_that_the_planner_takes_for_it() -> None:
    shape = replace(PRESETS["tiny"], vocabulary=512)
    length = 128
    found = trace_module(lambda: Decoder(shape), tokens(length), cross_entropy, micro_batch=2)
    ahead = found.forward.of(1)

    assert found.parameters == shape.parameters
    expected = length * (shape.layers * block_forward_flops(shape, length) + head_forward_flops(shape))
    assert ahead.products + ahead.scores == pytest.approx(expected, rel=1e-9)
    # Backwards take twice the products; flash attention's computes five where the forward has two.
    back = found.backward.of(1)
    assert back.products == pytest.approx(2 * ahead.products)
    assert back.scores == pytest.approx(2.5 * ahead.scores)
    assert found.flops(4) == pytest.approx(12 * expected)


@pytest.mark.parametrize(("depth", "parameters", "macs"), [(50, 25_557_032, 4.09e9), (152, 60_192_808, 11.51e9)])
def test_a_resnet_has_its_published_size_and_the_counts_of_the_closed_form(
    depth: int, parameters: int, macs: float
) -> None:
    # Parameters and multiply-accumulates as torchvision's model cards give them.
    found = trace_module(lambda: make_resnet(depth), batches(3, 224, 224), cross_entropy, micro_batch=2)
    ahead, layers = found.forward.of(1), resnet(depth)

    assert found.parameters == parameters == resnet_parameters(layers)
    assert ahead.products / 2 == pytest.approx(macs, rel=0.002)
    assert ahead.products == pytest.approx(float(resnet_demand(layers, 1.0).products), rel=1e-9)
    # The first convolution's input wants no gradient.
    first = layers[0]
    assert found.backward.of(1).products == pytest.approx(
        2 * ahead.products - 2 * first.side**2 * first.depth * first.outputs
    )
    assert found.blocks == 4 + sum(RESNETS[depth]) + 3


def test_an_encoder_of_berts_shape_has_berts_size() -> None:
    found = trace_module(Bert, tokens(128), total, micro_batch=2)
    ahead = found.forward.of(1)

    assert found.parameters == 109_482_240  # Devlin et al.: 110 M
    # Per token 12 layers of 12 × 768² matrix entries, and scores both ways over all 128; the pooler looks at one.
    body = 2 * 128 * 12 * 12 * 768**2 + 12 * 4 * 128 * 128 * 768 + 2 * 768**2
    assert ahead.products + ahead.scores == pytest.approx(body, rel=1e-6)


@pytest.mark.parametrize(
    ("build", "batch", "loss"),
    [
        (lambda: make_resnet(50, base=8), batches(3, 64, 64), cross_entropy),
        (lambda: Bert(layers=2, width=64, heads=2, words=100), tokens(32), total),
        (lambda: Decoder(replace(PRESETS["tiny"], vocabulary=256)), tokens(64), cross_entropy),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 10)),
         batches(3, 8, 8), cross_entropy),
    ],
    ids=["resnet", "encoder", "decoder", "perceptron"],
)  # fmt: skip
@pytest.mark.parametrize("samples", [2, 6])
def test_activations_are_those_of_a_real_run(build: Any, batch: Any, loss: Any, samples: int) -> None:
    found = trace_module(build, batch, loss, micro_batch=2)

    assert kept(found, samples) == pytest.approx(kept_for_real(build(), batch(samples), loss), rel=0.05)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x, state = self.lstm(self.embedding(tokens))
        return {"logits": self.head(self.frozen(x)), "state": state}


def test_ties_frozen_parts_buffers_and_dictionaries_are_told_apart() -> None:
    found = trace_module(Tied, tokens(8), lambda out, target: cross_entropy(out["logits"], target), micro_batch=2)
    parts = {part.name: part for part in found.parts}

    recurrent = 4 * 16 * (16 + 16 + 2)
    assert found.parameters == 100 * 16 + recurrent + 16 * 17
    assert parts["head"].shared == (("embedding", 1600),)
    assert parts["frozen"].parameters == 272
    assert parts["frozen"].trained == 0
    assert parts[""].buffers == 12
    # Per token: the head, the frozen layer, and the cell's four gates from input and state.
    assert found.forward.of(1).products == pytest.approx(8 * 2 * (1600 + 256 + 4 * 16 * 32))
    # The frozen layer passes a gradient on and makes none of its own.
    assert parts["frozen"].backward.of(1).products == pytest.approx(8 * 2 * 256)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (gradient + gradient.T) @ x


class Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(super().forward(x))


def test_a_function_with_a_backward_of_its_own_is_counted_where_it_runs() -> None:
    found = trace_module(lambda: Custom(4, 6), batches(4), total, micro_batch=8)
    (part,) = [part for part in found.parts if part.name == ""]

    # The product over pairs of samples grows with their square; at the micro-batch itself the count is exact.
    assert part.forward.of(8).products == pytest.approx(2 * 8 * 4 * 6 + 2 * 8 * 8 * 6)
    assert part.backward.of(8).products == pytest.approx(2 * 8 * 4 * 6 + 2 * 8 * 8 * 6)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def test_recomputed_layers_keep_their_input_and_compute_twice() -> None:
    found = trace_module(Recomputed, batches(32), cross_entropy, micro_batch=4)
    ahead, back = found.forward.of(1).products, found.backward.of(1).products

    body = 2 * (32 * 128 + 128 * 32)
    assert ahead == pytest.approx(body + 2 * 32 * 10)
    # Twice the forward without the first layer's input; once more, but for the last layer, whose output nothing needs.
    assert back == pytest.approx(2 * ahead - 2 * 32 * 128 + 2 * 32 * 128)
    assert kept(found, 4) == pytest.approx(kept_for_real(Recomputed(), batches(32)(4), cross_entropy), rel=0.05)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        self.layer = nn.Linear(4, 10)
        self.twin = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 - self.rates[2])


def test_a_constructor_that_needs_values_gets_them() -> None:
    found = trace_module(Deep, batches(4), cross_entropy)

    assert found.parameters == 50
    assert "built for real" in found.notes[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(8, 8, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


def test_a_recurrent_layer_is_counted_step_by_step() -> None:
    found = trace_module(Recurrent, batches(5, 8), cross_entropy)

    # Three gates from input and state, five steps, two ways; the second layer reads both ways of the first.
    gates = 5 * 2 * 2 * 3 * 8 * ((8 + 8) + (16 + 8))
    assert found.forward.of(1).products == pytest.approx(gates + 2 * 16 * 10)


class FromNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.jit.script(nn.Linear(4, 10))
        self.layer.weight.data = torch.from_numpy(np.ones((10, 4), dtype=np.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_weights_from_numpy_and_scripted_layers_are_counted() -> None:
    found = trace_module(FromNumpy, batches(4), cross_entropy)

    assert found.parameters == 50
    assert found.flops(3) == pytest.approx(3 * 2 * 2 * 40)


class Branching(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_a_branch_on_values_is_computed_for_real_where_the_model_is_small() -> None:
    found = trace_module(lambda: Branching(10), batches(10), cross_entropy, micro_batch=2)

    assert found.parameters == 110
    assert found.forward.of(1).products == pytest.approx(2 * 100)
    assert "computed for real" in found.notes[0]


def test_a_branch_on_values_of_a_large_model_leaves_its_work_open_and_says_what_helps() -> None:
    found = trace_module(lambda: Branching(20_000), batches(20_000), cross_entropy)

    assert found.parts == ()
    assert "cannot be followed without values" in found.notes[0]
    assert ".item()" in found.notes[0]


class LookUp(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4, sparse=sparse)
        self.line = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        looked: Tensor = self.line(x) + self.table(torch.arange(len(x)) % 100)
        return looked


def test_gradients_of_a_sparse_table_take_their_rows_alone() -> None:
    found = trace_module(lambda: LookUp(sparse=True), batches(10), total, micro_batch=4)
    dense = trace_module(lambda: LookUp(sparse=False), batches(10), total, micro_batch=4)

    table, full = ({part.name: part for part in trace.parts}["table"] for trace in (found, dense))
    row, index = 4 * 4, 8
    assert found.parameters == 100 * 4 + 10 * 4 + 4
    assert found.flops(3) == dense.flops(3) == 3 * 2 * 2 * 10 * 4  # nothing asks for the input's gradient
    assert table.forward.each.moved == 2 * row + index  # a row is read and written
    assert table.forward.once.moved == 0
    assert table.kept == full.kept
    assert full.backward.of(4).moved >= 100 * row  # the whole table's gradient is written
    assert table.backward.of(4).moved < 100 * row


class Exactly(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples, self.line = samples, nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.samples:
            raise ValueError(f"{len(x)} samples, and not {self.samples}")
        looked: Tensor = self.line(x)
        return looked


def test_a_module_that_takes_its_own_micro_batch_alone_is_counted_there() -> None:
    found = trace_module(lambda: Exactly(4), batches(10), total, micro_batch=4)
    free = trace_module(lambda: nn.Sequential(nn.Linear(10, 5)), batches(10), total, micro_batch=4)

    assert found.forward.of(4) == free.forward.of(4)
    assert found.backward.of(4) == free.backward.of(4)
    assert found.forward.of(4).products == 4 * 2 * 10 * 5
    assert sum(part.kept.of(4) for part in found.parts) == sum(part.kept.of(4) for part in free.parts)
    assert "4 samples alone" in found.notes[0]
    assert free.notes == ()


def test_a_module_that_takes_other_micro_batches_alone_is_an_error() -> None:
    with pytest.raises(ModelError, match="4 samples, and not 6"):
        trace_module(lambda: Exactly(6), batches(10), total, micro_batch=4)


class Shy(nn.Linear):
    """Runs, unless someone counts."""

    def forward(self, x: Tensor) -> Tensor:
        if _len_torch_dispatch_stack():
            raise NotImplementedError("not while someone counts")
        return super().forward(x)


def test_where_counting_fails_the_work_stays_open_and_the_module_is_not_blamed() -> None:
    found = trace_module(lambda: Shy(10, 5), batches(10), total)

    assert found.parts == ()
    assert "a step of your module runs" in found.notes[0]
    assert "not while someone counts" in found.notes[0]


def test_bfloat16_halves_what_is_kept() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def halves(samples: int) -> tuple[Tensor, Tensor]:
        return torch.rand(samples, 64).bfloat16(), torch.zeros(samples)

    wide = trace_module(build, batches(64), total)
    half = trace_module(build, halves, total, dtype=torch.bfloat16)

    assert [p.kept.of(4) for p in half.parts[:3]] == [p.kept.of(4) / 2 for p in wide.parts[:3]]


def test_a_resnet_moves_the_bytes_that_the_closed_form_takes_for_it() -> None:
    def halves(samples: int) -> tuple[Tensor, Tensor]:
        return torch.rand(samples, 3, 224, 224).bfloat16(), torch.zeros(samples, dtype=torch.int64)

    found = trace_module(lambda: make_resnet(50), halves, cross_entropy, dtype=torch.bfloat16)

    # Normalisation, activation and sums, read and written on their own; the closed form takes a third for the sums.
    expected = float(resnet_demand(resnet(50), 1.0).traffic)
    assert found.forward.each.moved == pytest.approx(expected, rel=0.15)


def test_building_for_real_leaves_the_process_as_it_was() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with trace._limited_memory():
        assert resource.getrlimit(resource.RLIMIT_AS)[0] != before[0]
    assert resource.getrlimit(resource.RLIMIT_AS) == before
