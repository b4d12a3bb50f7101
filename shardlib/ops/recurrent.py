"""Recurrent layers: the batch is rows; time, features and weights are whole."""

from shardlib.ops.declare import Bound, declare, slots
from shardlib.ops.dims import Labels, Unfit


def _recurrent(b: Bound) -> Labels:
    x = b["input"]
    if x.ndim != 3 or (b["dropout"] and b["train"]):
        raise Unfit("no batch, or dropout")
    out: Labels = {s.at: (None,) * s.ndim for s in slots(b["params"])}
    out |= {s.at: (None, "b", None) for s in slots(b["hx"])}
    out[x.at] = ("b", None, None) if b["batch_first"] else (None, "b", None)
    return out


declare(
    """
    lstm(input, hx, params: tensors, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    gru(input, hx, params: tensors, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    rnn_tanh(input, hx, params: tensors, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    rnn_relu(input, hx, params: tensors, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    """,
    _recurrent,
)
