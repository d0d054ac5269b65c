"""The rotary position embedding of queries and keys, with its gradient.

function.py   the public function: binds arguments to rotations    arguments.py   checks them
operator.py   onchip::rotary: schema, fake kernel, autograd, vmap; the direct way of plain eager code
rotation.py   one rotation as a value, its positions and angles    plain.py   torch operations
launch.py     from a rotation to a launch                          kernel.py  the Triton kernel
"""

from onchip.rotary.function import rotary as rotary
