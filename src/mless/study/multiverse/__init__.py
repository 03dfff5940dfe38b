"""One comparison in every specification of a grid of settings: measure, tables, words."""
