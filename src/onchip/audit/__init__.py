"""How exact attention is, and what its rounding does to training."""
