"""What `onchip tune` does: which tiles of the portable kernels are the fastest on the card at hand.

cases.py       a problem for each row of the table, and the heaviest ones that its tile must serve
candidates.py  tiles to try        search.py  successive halving, within a time
card.py        compiling, checking and timing on a CUDA device    session.py  row by row, each written at once
"""
