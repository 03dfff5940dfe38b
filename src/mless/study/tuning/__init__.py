"""ARM's parameters chosen on some items and judged on others: measure, choosing, words."""
