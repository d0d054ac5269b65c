"""What `onchip demo` computes: a sentence model with onchip inside, and long sequences beside standard attention."""
