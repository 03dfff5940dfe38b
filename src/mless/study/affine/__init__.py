"""Attention outputs as λ·o + σ: measure, tables, words."""
