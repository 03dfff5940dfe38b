"""What a filler's effect is made of: cells, measure, tables, words."""
