"""Answers drawn, judged and compared: measure, tables, words."""
