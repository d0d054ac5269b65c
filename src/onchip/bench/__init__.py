"""Measuring: the timer, peak memory, the record of a measurement, and the demo. `import onchip` does not load this."""
