"""What an author of an algorithm needs; ``docs/writing_an_algorithm.md`` writes one.

An *operator* has one implementation and, for matmul and attention, several *algorithms*.  Each
looks at a case and answers with a ``Match`` (the result's layout, its price, what runs) or with a
sentence saying why it does not fit.
"""

from shardlib.cost import Cost, moving, summing
from shardlib.ops.attention.masks import Mask
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import Schedule
from shardlib.ops.registry import Match, algorithm, remove

__all__ = ["Cost", "Mask", "Match", "MatmulCase", "Schedule", "algorithm", "moving", "remove", "summing"]
