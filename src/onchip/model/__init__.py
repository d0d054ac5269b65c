"""What attention moves and how long that takes at least: byte counts, a simulated memory, hardware and its roofline."""
