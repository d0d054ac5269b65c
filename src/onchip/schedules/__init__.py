"""How a problem is computed. Each module holds one schedule; `onchip.dispatch` lists them."""
