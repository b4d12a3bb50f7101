import torch

from shardlib.optim.buckets import Memory, Room


def test_memory_is_used_again_once_it_is_given_back() -> None:
    memory, cpu = Memory(), torch.device("cpu")
    a = memory.take((4, 8), torch.float32, cpu)
    b = memory.take((32,), torch.float32, cpu)
    assert a.data_ptr() != b.data_ptr()
    at = a.data_ptr()
    memory.give(a, torch.zeros(32))  # what it never lent is left alone
    assert memory.take((30,), torch.float32, cpu).data_ptr() == at
    assert memory.take((30,), torch.float32, cpu).data_ptr() != at
    assert memory.take((32,), torch.float64, cpu).data_ptr() != at


def test_on_the_meta_device_storages_are_told_apart() -> None:
    """All their addresses are 0: what was never lent must not be taken for what was."""
    memory, meta = Memory(), torch.device("meta")
    a, b = (memory.take((32,), torch.float32, meta) for _ in "ab")
    memory.give(torch.empty(32, device="meta"))
    assert len(memory.lent) == 2 and not any(memory.free.values())
    memory.give(a, b)
    assert not memory.lent and len(memory.free[torch.float32, meta]) == 2


def test_a_buffer_is_used_again_once_no_tensor_looks_at_it() -> None:
    room, like = Room(), torch.empty(0)
    a = room.buffer((4, 8), like)
    view, at = a[1:].mT, a.data_ptr()
    del a
    assert room.buffer((32,), like).data_ptr() != at
    del view
    assert room.buffer((32,), like).data_ptr() == at
