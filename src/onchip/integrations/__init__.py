"""Other libraries' attention, run on onchip."""
