"""Rows of the matrix of a role's loads: one column for each replica, float64."""

N = 0
"""Sequences."""
TOK = 1
"""Tokens resident."""
ROOM = 2
"""KV tokens not set aside."""
T = 3
"""Throughput, tokens/s."""
OPEN_T = 4
"""T of an open replica, -1 of a closed one."""
THRESHOLD = 5
"""T of an open replica; infinite of a closed one, which can never exceed it."""
BASE = 6
"""Seconds of a step with one sequence more, without that sequence's tokens."""
GAIN = 7
"""Room to work in."""
OFFER = 8
"""KV tokens offered to dispatch: ROOM, or minus infinity while a further sequence would gain too little."""
NUM_ROWS = 9

OVERHEAD = 0
"""Of the table of steps, by n: the part of a step of n sequences that does not depend on tokens, seconds."""
MOST_ATTENTION = 1
"""Of the table of steps, by n: seconds of attention up to which a replica of n takes one more."""
