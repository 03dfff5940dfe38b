"""A result folder from both sides: what is written, what is read, and how its numbers are said; each stated once."""
