"""Named fillers among arbitrary edits of the same length at the same place: measure, tables, words."""
