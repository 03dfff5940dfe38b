"""Log-probabilities of reference solutions and answers: measure, tables, words."""
