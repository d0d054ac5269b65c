"""What the schedules of GPU kernels share: how a problem becomes what a kernel is given, and what it then moves.

call.py    a problem on its way to kernels        parts.py   functions on the device: geometry, loads, dropout
source.py  masks and scores as source to inline   walk.py    which tiles are visited
counts.py  what a kernel moves and computes       sides.py   beside query, key and value
"""

FORWARD, KEYS, QUERIES, GRADIENT = "forward", "keys", "queries", "gradient"
"""The kernels: out and LSE; dK and dV; dQ; the gradient of a bias or of slopes."""
