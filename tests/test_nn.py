"""Every class of torch.nn, its batch split over data and its
weights whole, in training and in evaluation.

Results and the gradients of all parameters, by name, and of all inputs equal dense.
"""

import warnings
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import nn

import shardlib as sl
from tests.database import close

BATCH = 4

# ---------------------------------------------------------------- the classes, and how each is made
# and called


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def unit(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64) * 0.9 + 0.05


def ids(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape)


def sign(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


def wide(d: int, channels: int = 4) -> torch.Tensor:
    """A batch with channels and ``d`` dimensions of space."""
    return real(BATCH, channels, *(6,) * d)


def pooled(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    return getattr(nn, f"MaxPool{d}d")(2, return_indices=True)(wide(d))


Case = tuple[
    Callable[[], nn.Module], Callable[[], tuple[Any, ...]], int
]  # made by, called with, dimension of the batch
CASES: dict[str, Case] = {}


def case(
    name: str, *given: Any, inputs: Callable[[], tuple[Any, ...]], at: int = 0, **named: Any
) -> None:
    CASES[name] = (lambda: getattr(nn, name)(*given, **named), inputs, at)


for _name in """
    CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU
    ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink PReLU RReLU Dropout
    AlphaDropout FeatureAlphaDropout GLU
""".split():
    case(_name, inputs=lambda: (real(BATCH, 6),))
for _name in ("Softmax", "Softmin", "LogSoftmax"):
    case(_name, -1, inputs=lambda: (real(BATCH, 6),))
case("Threshold", 0.1, 2.0, inputs=lambda: (real(BATCH, 6),))
case("Softmax2d", inputs=lambda: (wide(2),))
case("Flatten", inputs=lambda: (wide(2),))
case("Unflatten", 1, (2, 3), inputs=lambda: (real(BATCH, 6),))
for _d in (1, 2, 3):
    _wide = lambda d=_d: (wide(d),)  # noqa: E731
    for _name in ("Avg", "Max"):
        case(f"{_name}Pool{_d}d", 2, inputs=_wide)
        case(f"Adaptive{_name}Pool{_d}d", 3, inputs=_wide)
    case(f"LPPool{_d}d", 2.0, 2, inputs=_wide)
    case(f"MaxUnpool{_d}d", 2, inputs=lambda d=_d: pooled(d))
    for _name in ("Circular", "Reflection", "Replication", "Zero"):
        case(f"{_name}Pad{_d}d", 1, inputs=_wide)
    case(f"ConstantPad{_d}d", 1, 0.5, inputs=_wide)
    case(f"Conv{_d}d", 4, 6, 3, padding=1, inputs=_wide)
    case(f"ConvTranspose{_d}d", 4, 6, 3, stride=2, inputs=_wide)
    case(f"BatchNorm{_d}d", 4, inputs=_wide)
    case(f"InstanceNorm{_d}d", 4, affine=True, track_running_stats=True, inputs=_wide)
    case(f"Dropout{_d}d", inputs=_wide)
for _d in (2, 3):
    case(f"FractionalMaxPool{_d}d", 2, output_size=3, inputs=lambda d=_d: (wide(d),))
for _name in ("LocalResponseNorm", "CrossMapLRN2d"):
    case(_name, 2, inputs=lambda: (wide(2),))
case("GroupNorm", 2, 4, inputs=lambda: (wide(2),))
case("LayerNorm", 6, inputs=lambda: (real(BATCH, 3, 6),))
case("RMSNorm", 6, inputs=lambda: (real(BATCH, 3, 6),))
case("PixelShuffle", 2, inputs=lambda: (wide(2),))
case("PixelUnshuffle", 2, inputs=lambda: (wide(2),))
case("ChannelShuffle", 2, inputs=lambda: (wide(2),))
case("Upsample", scale_factor=2, mode="bicubic", inputs=lambda: (wide(2),))
case("UpsamplingBilinear2d", scale_factor=2, inputs=lambda: (wide(2),))
case("UpsamplingNearest2d", scale_factor=2, inputs=lambda: (wide(2),))
case("Fold", (4, 4), 2, stride=2, inputs=lambda: (real(BATCH, 8, 4),))
case("Unfold", 2, inputs=lambda: (wide(2),))
case("Linear", 6, 5, inputs=lambda: (real(BATCH, 6),))
case("Bilinear", 6, 5, 3, inputs=lambda: (real(BATCH, 6), real(BATCH, 5)))
case("Embedding", 7, 5, inputs=lambda: (ids(7, BATCH, 3),))
case("EmbeddingBag", 7, 5, inputs=lambda: (ids(7, BATCH, 3),))
case("CosineSimilarity", inputs=lambda: (real(BATCH, 6), real(BATCH, 6)))
case("PairwiseDistance", inputs=lambda: (real(BATCH, 6), real(BATCH, 6)))
for _name in ("RNN", "LSTM", "GRU"):
    case(_name, 6, 5, inputs=lambda: (real(3, BATCH, 6),), at=1)
    case(f"{_name}Cell", 6, 5, inputs=lambda: (real(BATCH, 6),))
case("MultiheadAttention", 8, 2, batch_first=True, inputs=lambda: (real(BATCH, 3, 8),) * 3)
case(
    "Transformer",
    8,
    2,
    1,
    1,
    12,
    0.0,
    batch_first=True,
    inputs=lambda: (real(BATCH, 3, 8), real(BATCH, 2, 8)),
)
for _name, _count in (("TransformerEncoder", 1), ("TransformerDecoder", 2)):
    _args = lambda n=_count: tuple(real(BATCH, 3, 8) for _ in range(n))  # noqa: E731
    _layer = lambda name=_name: getattr(nn, name + "Layer")(8, 2, 12, 0.0, batch_first=True)  # noqa: E731
    CASES[f"{_name}Layer"] = (_layer, _args, 0)
    CASES[_name] = (lambda name=_name, layer=_layer: getattr(nn, name)(layer(), 2), _args, 0)
for _name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss"):
    case(_name, inputs=lambda: (real(BATCH, 6), real(BATCH, 6)))
case("BCELoss", inputs=lambda: (unit(BATCH, 6), unit(BATCH, 6)))
case("BCEWithLogitsLoss", inputs=lambda: (real(BATCH, 6), unit(BATCH, 6)))
case("MultiLabelSoftMarginLoss", inputs=lambda: (real(BATCH, 6), ids(2, BATCH, 6).double()))
case("MultiLabelMarginLoss", inputs=lambda: (real(BATCH, 6), ids(6, BATCH, 6)))
case(
    "KLDivLoss",
    reduction="batchmean",
    inputs=lambda: (real(BATCH, 6).log_softmax(-1), unit(BATCH, 6)),
)
case("PoissonNLLLoss", inputs=lambda: (real(BATCH, 6), unit(BATCH, 6)))
case("GaussianNLLLoss", inputs=lambda: (real(BATCH, 6), real(BATCH, 6), unit(BATCH, 6)))
case("SoftMarginLoss", inputs=lambda: (real(BATCH, 6), sign(BATCH, 6)))
case("HingeEmbeddingLoss", inputs=lambda: (real(BATCH, 6), sign(BATCH, 6)))
case("MarginRankingLoss", inputs=lambda: (real(BATCH), real(BATCH), sign(BATCH)))
case("CosineEmbeddingLoss", inputs=lambda: (real(BATCH, 6), real(BATCH, 6), sign(BATCH)))
for _name in ("NLLLoss", "CrossEntropyLoss", "MultiMarginLoss"):
    case(_name, inputs=lambda: (real(BATCH, 6), ids(6, BATCH)))
for _name in ("TripletMarginLoss", "TripletMarginWithDistanceLoss"):
    case(_name, inputs=lambda: (real(BATCH, 6), real(BATCH, 6), real(BATCH, 6)))
case(
    "AdaptiveLogSoftmaxWithLoss",
    6,
    8,
    [3, 5],
    inputs=lambda: (real(BATCH, 6), torch.tensor([0, 4, 6, 2])),
)


def ctc() -> tuple[torch.Tensor, ...]:
    lengths = torch.full((BATCH,), 5), torch.full((BATCH,), 2)
    return real(5, BATCH, 6).log_softmax(-1), ids(5, BATCH, 2) + 1, *lengths


case("CTCLoss", inputs=ctc, at=1)
case("LinearCrossEntropyLoss", 6, 5, inputs=lambda: (real(BATCH, 6), ids(5, BATCH)))

APART = frozenset(
    """
    Module Container Sequential ModuleList ModuleDict ParameterList ParameterDict DataParallel
    RNNBase RNNCellBase SyncBatchNorm NLLLoss2d
    """.split()
)  # containers, abstract bases, wrappers of processes, and the old name of NLLLoss

CELL = "torch's kernel of one step is not declared; the layers of whole sequences are"
GATHERS = {
    "AdaptiveLogSoftmaxWithLoss": "writes each cluster's rows into one result, by position in the whole batch",
    "CTCLoss": "lengths are read as numbers by the kernel",
    "EmbeddingBag": "its offsets are positions in the whole batch",
    "GaussianNLLLoss": "no declaration of its function: it runs on whole operands",
    "InstanceNorm1d": "the running statistics are means over the batch",
    "InstanceNorm2d": "the running statistics are means over the batch",
    "InstanceNorm3d": "the running statistics are means over the batch",
    "RNNCell": CELL,
    "GRUCell": CELL,
    "LSTMCell": CELL,
    "Unfold": "found by its name, which is also that of Tensor.unfold, whose dimensions are other ones",
}  # classes that need sl.implicit() for a split batch, and why
TRAINING = ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")  # and those only then
REFUSED = {
    "CrossMapLRN2d": "a Function that takes empty memory and gives it a size"
}  # classes that are refused within it too


def classes() -> set[str]:
    """The classes that torch.nn has in this version and that take tensors."""
    found = {n for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    return {n for n in found - APART if not n.startswith("Lazy")}


def made(name: str, training: bool) -> tuple[nn.Module, list[Any], list[str | None]]:
    module, inputs, at = CASES[name]
    torch.manual_seed(0)
    net = module().double().train(training)
    args = [x.detach() for x in inputs()]
    return net, args, [layout(x, at) for x in args]


def layout(x: torch.Tensor, at: int) -> str:
    k = at if x.ndim > at and x.shape[at] == BATCH else 0
    return " ".join("data" if d == k else "." for d in range(x.ndim))


def leaves(tree: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, torch.Tensor)]


def whole(x: Any) -> torch.Tensor:
    return (sl.unshard(x) if isinstance(x, sl.ShardedTensor) else x).detach()


def sharded(
    name: str, training: bool, ranks: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Results and gradients by name on so many simulated ranks, the batch split over them."""
    net, args, layouts = made(name, training)
    with sl.simulate(data=ranks):
        apply, params = sl.parallelize(net, [("*", "...")] if list(net.parameters()) else [])
        values = [leaf(sl.shard(x, t)) for x, t in zip(args, layouts, strict=True)]
        torch.manual_seed(5)
        out = leaves(apply(params, *values))
        derive(out)
        return [whole(x) for x in out], graded(
            {**params, **{f"input {i}": x for i, x in enumerate(values)}}
        )


def dense(name: str, training: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    net, args, _ = made(name, training)
    values = [leaf(x.clone()) for x in args]
    out = leaves(net(*values))
    derive(out)
    named = dict(net.named_parameters())
    return [whole(x) for x in out], graded(
        {**named, **{f"input {i}": x for i, x in enumerate(values)}}
    )


def leaf(x: torch.Tensor) -> torch.Tensor:
    """Wants a gradient, but for targets that are whole numbers."""
    return x.requires_grad_(x.is_floating_point() and bool((x != x.round()).any()))


def derive(out: list[torch.Tensor]) -> None:
    """Backward from every result, each weighted by its own
    values, so that no softmax's gradient is zero.
    """
    with_graph = [x for x in out if x.requires_grad]
    if with_graph:
        sum((x * x).sum() for x in with_graph).backward()  # type: ignore[union-attr]


def graded(named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients that are not zero, by name."""
    found = {
        n: whole(x.grad)
        for n, x in named.items()
        if isinstance(x, torch.Tensor) and x.grad is not None
    }
    return {n: g for n, g in found.items() if g.any()}


def draws(name: str, training: bool) -> bool:
    random = name.startswith("FractionalMaxPool") or "Dropout" in name or name == "RReLU"
    return random and (training or name.startswith("FractionalMaxPool"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(CASES.keys() & classes()))
def test_a_class_with_its_batch_split_equals_dense(name: str, training: bool) -> None:
    """Those that draw equal their own draw on one rank."""
    if name in REFUSED:
        with pytest.raises(sl.ShardError), sl.implicit():
            sharded(name, training, 2)
        return
    want, gradients = sharded(name, training, 1) if draws(name, training) else dense(name, training)
    if name in GATHERS and (training or name not in TRAINING):
        with pytest.raises(sl.ShardError):
            sharded(name, training, 2)
        with sl.implicit():
            got, found = sharded(name, training, 2)
    else:
        got, found = sharded(name, training, 2)
    assert len(got) == len(want) and all(map(close, want, got))
    assert found.keys() == gradients.keys()
    assert all(close(gradients[n], found[n]) for n in gradients)


def test_every_class_is_here_and_few_are_refused() -> None:
    assert classes() <= CASES.keys()
    assert len(REFUSED) <= 6 and len(CASES.keys() & classes()) - len(GATHERS) - len(REFUSED) >= 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_gradients = [n for n in sorted(CASES.keys() & classes()) if dense(n, False)[1]]
    assert len(with_gradients) > 110
