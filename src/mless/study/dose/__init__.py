"""Fillers in many lengths and places: measure, tables, words."""
