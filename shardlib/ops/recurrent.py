"""Recurrent layers: the batch is rows; time, features and weights are whole."""

from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F

from shardlib.ops.declare import Bound, declare, slots
from shardlib.ops.dims import Labels
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import TABLE, Unfit


@declare(
    "lstm gru rnn_tanh rnn_relu(input, hx, params: tensors, has_biases, num_layers, dropout, train, "
    "bidirectional, batch_first)"
)
def _recurrent(b: Bound) -> Labels:
    x = b["input"]
    if x.ndim != 3 or (b["dropout"] and b["train"]):
        raise Unfit("no batch, or dropout")
    out: Labels = {s.at: (None,) * s.ndim for s in slots(b["params"])}
    out |= {s.at: (None, "b", None) for s in slots(b["hx"])}
    out[x.at] = ("b", None, None) if b["batch_first"] else (None, "b", None)
    return out


def _by_layers(implementation: Any, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run one layer after the other with ``F.dropout``, keyed by position, between them."""
    if kwargs or len(args) != 9 or not isinstance(args[3], bool) or not (args[5] and args[6]):
        return implementation(func, args, kwargs)
    x, hx, params, biases, layers, p, train, both, first = args
    each, ways = len(params) // layers, 2 if both else 1
    ends = []
    for n in range(layers):
        ours = slice(n * ways, (n + 1) * ways)
        mine: Any = optree.tree_map(lambda s, ours=ours: s[ours], hx)
        weights = params[n * each : (n + 1) * each]
        x, *end = func(x, mine, weights, biases, 1, 0.0, train, both, first)
        ends.append(end)
        x = F.dropout(x, p) if n + 1 < layers else x
    return (x, *(torch.cat(s) for s in zip(*ends, strict=True)))


for _f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    TABLE[_f] = partial(_by_layers, TABLE[_f])
